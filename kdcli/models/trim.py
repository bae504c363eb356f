"""Cut a vocabulary to the tokens that a set of texts needs.

Both the tokenizer and the rows of the model's tables are cut. A text whose tokens are all kept is
segmented as before:

* WordPiece takes the longest token that fits. With fewer tokens, the longest one is still there.
* Unigram takes the likeliest path. With fewer paths, it is still the likeliest. The least likely
  token stays, because the score of an unknown character is derived from it.
* BPE merges the pair with the lowest rank. A token is kept with every token that is merged on the
  way to it. No merge crosses the borders of the final tokens, so each step finds the same pair.

Special tokens and single characters or bytes always stay, so other text is split into smaller
pieces instead of unknown ones. WordPiece and Unigram keep only the letters of writing systems that
the texts use: of 250,002 tokens of XLM-R, 13,000 are letters, most of them Chinese.
"""

import copy
import functools
import itertools
import json
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.models.custom_class import LABEL_WORDS_KEY, UNILM_KEY, empty_model, load_tensors
from kdcli.models.load import load_tokenizer, save_tokenizer
from kdcli.models.static import FRAMING_KEY
from kdcli.models.tokenizer_files import AS_LOADED
from kdcli.types import Array

TRIMMABLE_KINDS = ("WordPiece", "BPE", "Unigram", "WordLevel")
TOKENIZER_FILE = "tokenizer.json"
ID_ENDING = "_token_id"  # ending of the configuration keys that hold a token
LEAST_SHARE = 1e-3
"""Minimum share of the texts' letters at which a writing system is in use. Below it, such as in an
English text with a few Chinese names, a letter stays only if its token occurs."""


def check_trimmable(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that cutting a tokenizer's vocabulary keeps its segmentation.

    Raises UsageError if it does not.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"the tokenizer of {source} is {type(tokenizer).__name__}, which has no "
            f"{TOKENIZER_FILE}",
            "only a fast tokenizer's vocabulary can be cut",
        )
    model = _description(tokenizer)["model"]
    if model["type"] not in TRIMMABLE_KINDS:
        raise UsageError(
            f"the tokenizer of {source} is of kind {model['type']}, which cannot be cut",
            f"supported: {', '.join(TRIMMABLE_KINDS)}",
        )
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model["type"] == "BPE" and model.get(name):
            raise UsageError(
                f"the BPE tokenizer of {source} has {name}={model[name]!r}, so its vocabulary "
                "cannot be cut"
            )


def needed_by(
    tokenizer: PreTrainedTokenizerBase, shares_V: Array
) -> Callable[[Iterable[int]], Array]:
    """Return a function from token ids to the sorted ids that must be kept with them.

    Texts of these tokens are then segmented as before. The function adds the tokens that BPE merges
    into them, added and special tokens, single characters in use, and bytes.

    Args:
        tokenizer: The tokenizer that is cut.
        shares_V: The share of each token in the texts, or how often it occurs.
    """
    description = _description(tokenizer)
    model, number = description["model"], tokenizer.get_vocab()
    always = {added["id"] for added in description["added_tokens"]} | set(tokenizer.all_special_ids)
    prefix = model.get("continuing_subword_prefix") or ""
    single = {n: token.removeprefix(prefix) for token, n in number.items()}
    single = {n: character for n, character in single.items() if len(character) == 1}
    if model["type"] in ("WordPiece", "Unigram"):
        in_use = _writing_systems(number, shares_V)
        single = {n: c for n, c in single.items() if _writing_system(c) in in_use}
    always |= single.keys() | {n for token, n in number.items() if _is_byte(token)}
    if model["type"] == "Unigram":
        always |= {
            min(range(len(model["vocab"])), key=lambda n: model["vocab"][n][1]),
            model["unk_id"],
        } - {None}
    if model["type"] != "BPE":
        return lambda ids: np.array(sorted(always.union(map(int, ids))), dtype=np.int64)
    ranks = {pair: rank for rank, pair in enumerate(_merges(model))}
    names = {n: token for token, n in number.items()}

    @functools.cache
    def way(token: int) -> set[int]:
        return {token, *(number[part] for part in _parts(names[token], ranks) if part in number)}

    return lambda ids: np.array(
        sorted(set().union(*map(way, always.union(map(int, ids))))), dtype=np.int64
    )


def _writing_systems(number: Mapping[str, int], shares_V: Array) -> set[str | None]:
    """Return the writing systems in use, and None, which stands for what is no letter."""
    letters: defaultdict[str, float] = defaultdict(float)
    for token, n in number.items():
        for character in token if shares_V[n] else "":
            if system := _writing_system(character):
                letters[system] += float(shares_V[n])
    least = LEAST_SHARE * sum(letters.values())
    return {None, *(system for system, share in letters.items() if share >= least)}


@functools.cache
def _writing_system(character: str) -> str | None:
    """Return the first word of a letter's Unicode name, such as LATIN or CJK; None for others."""
    if not unicodedata.category(character).startswith("L"):
        return None
    return unicodedata.name(character, "").split(" ")[0]


def cut_tokenizer(tokenizer: PreTrainedTokenizerBase, kept: Array) -> PreTrainedTokenizerBase:
    """Return a tokenizer that has only the tokens `kept`, numbered in that order.

    `kept` holds ids that `needed_by` returned. Raises UsageError if the tokenizer's class does not
    keep its tokens in tokenizer.json.
    """
    description = _description(tokenizer)
    place = {int(old): new for new, old in enumerate(kept)}
    model = description["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [row for old, row in enumerate(model["vocab"]) if old in place]
        model["unk_id"] = None if model["unk_id"] is None else place[model["unk_id"]]
    else:
        model["vocab"] = {
            token: place[old] for token, old in model["vocab"].items() if old in place
        }
    if model["type"] == "BPE":
        vocab = model["vocab"]
        model["merges"] = [
            [a, b] for a, b in _merges(model) if a in vocab and b in vocab and a + b in vocab
        ]
    for added in description["added_tokens"]:
        added["id"] = place[added["id"]]
    description["truncation"] = description["padding"] = None
    _renumber(description.get("post_processor"), place)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        settings = json.loads((Path(folder) / "tokenizer_config.json").read_text("utf-8"))
        # Other files may list tokens, which would be read in addition to this file.
        for file in Path(folder).iterdir():
            file.unlink()
        settings.pop("added_tokens_decoder", None)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        (Path(folder) / TOKENIZER_FILE).write_text(
            json.dumps(description, ensure_ascii=False), "utf-8"
        )
        cut = load_tokenizer(folder)
    # Some classes build their own Unigram model, in which the unknown token has a fixed place.
    same_unknown = _description(cut)["model"].get("unk_id") == model.get("unk_id")
    if not same_unknown or cut.convert_ids_to_tokens(
        range(len(kept))
    ) != tokenizer.convert_ids_to_tokens(kept.tolist()):
        raise UsageError(
            f"{type(tokenizer).__name__} does not keep its tokens in {TOKENIZER_FILE}, so they "
            "cannot be cut"
        )
    cut.name_or_path = tokenizer.name_or_path
    truncation, padding = getattr(tokenizer, AS_LOADED, (None, None))
    if padding is not None:
        padding = padding | {"pad_id": place.get(padding["pad_id"], cut.pad_token_id)}
    setattr(cut, AS_LOADED, (truncation, padding))
    return cut


def cut_model(model: PreTrainedModel, kept: Array) -> PreTrainedModel:
    """Return a model with only the rows `kept` of its token tables and vocabulary heads.

    All other tensors are shared. `kept` must include the tokens of `named_in`. Raises UsageError if
    the table has no row for a token.
    """
    rows = int(model.config.vocab_size)
    if kept[-1] >= rows:
        raise UsageError(
            f"the tokenizer has token {kept[-1]}, but the model has rows for {rows:,} tokens only",
            "use the tokenizer that belongs to the model",
        )
    place = {int(old): new for new, old in enumerate(kept)}
    config = copy.deepcopy(model.config)
    config.vocab_size = len(kept)
    for name, value in _ids_in(model.config.to_dict(), rows).items():
        setattr(config, name, place[value])
    if unilm := getattr(config, UNILM_KEY, None):
        setattr(
            config,
            UNILM_KEY,
            unilm | {name: place[value] for name, value in _ids_in(unilm, rows).items()},
        )
    if words := getattr(config, LABEL_WORDS_KEY, None):
        setattr(config, LABEL_WORDS_KEY, words | {"ids": [place[n] for n in words["ids"]]})
    if framing := getattr(config, FRAMING_KEY, None):
        setattr(config, FRAMING_KEY, [place[n] for n in framing])
    cut, at = empty_model(type(model), config), torch.from_numpy(kept)
    shapes = {name: tensor.shape for name, tensor in cut.state_dict().items()}
    tensors = {name: _cut(t, shapes[name], at) for name, t in model.state_dict().items()}
    cut = load_tensors(cut, tensors, model.base_model)
    if decoding := getattr(model, "generation_config", None):
        cut.generation_config = copy.deepcopy(decoding)
        cut.generation_config.update(
            **{n: place[value] for n, value in _ids_in(decoding.to_dict(), rows).items()}
        )
    return cut


def _cut(tensor: Tensor, shape: torch.Size, kept: Tensor) -> Tensor:
    """Select the entries `kept` along the dimension whose size differs from `shape`.

    A part of MobileBERT's masked-language-model head has one column per token.
    """
    for dim, (before, after) in enumerate(zip(tensor.shape, shape, strict=True)):
        if before != after:
            return tensor.index_select(dim, kept.to(tensor.device))
    return tensor


def named_in(config: PreTrainedConfig) -> set[int]:
    """Return the tokens that a configuration names."""
    ids = _ids_in(config.to_dict() | (getattr(config, UNILM_KEY, None) or {}), config.vocab_size)
    words = getattr(config, LABEL_WORDS_KEY, None) or {"ids": ()}
    return {*ids.values(), *words["ids"], *(getattr(config, FRAMING_KEY, None) or ())}


def _ids_in(settings: Mapping[str, object], rows: int) -> dict[str, int]:
    """Map each key to its token; defaults beyond a small vocabulary mean nothing."""
    tokens = {name: value for name, value in settings.items() if name.endswith(ID_ENDING)}
    return {n: v for n, v in tokens.items() if isinstance(v, int) and 0 <= v < rows}


def _description(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return description


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a BPE model's pairs in the order of their ranks.

    Old files hold them as strings, new files as lists.
    """
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _parts(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Return every token that BPE builds on the way from the characters to a token."""
    parts, seen = list(token), set(token)
    while pairs := [
        (ranks[pair], n) for n, pair in enumerate(itertools.pairwise(parts)) if pair in ranks
    ]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        seen.add(parts[at])
    return seen


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _renumber(processor: Any, place: Mapping[int, int]) -> None:
    """Give the new ids to the tokens that a post-processor adds."""
    if not isinstance(processor, dict):
        return
    for inner in processor.get("processors", ()):
        _renumber(inner, place)
    for name in ("sep", "cls"):
        if name in processor:
            processor[name][1] = place[processor[name][1]]
    for added in (processor.get("special_tokens") or {}).values():
        added["ids"] = [place[n] for n in added["ids"]]


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Array:
    """Count how often each token occurs in some texts, [V].

    Special tokens that frame a text are not counted.
    """
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    ids = np.fromiter((n for row in rows for n in row), np.int64)
    return np.bincount(ids, minlength=len(tokenizer))
