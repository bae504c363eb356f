"""A vocabulary cut to the tokens that texts need: the tokenizer of a model, and the rows of its
tables.

A text whose tokens are all kept is segmented as before:

* WordPiece takes the longest token that fits: among fewer tokens the longest is still there.
* Unigram takes the likeliest path: among fewer paths it is still the likeliest. The least likely
  token stays, because the score of an unknown character is made from it.
* BPE merges the pair of the lowest rank. A token is kept with every token on the way to it; as no
  merge crosses the borders of the final tokens, each step finds the same pair.

Special tokens and single characters or bytes always stay, so other text becomes smaller pieces, not
unknown ones.
"""

import copy
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.models.custom_class import LABEL_WORDS, UNILM, empty_model, load_tensors
from kdcli.models.load import load_tokenizer, save_tokenizer

KINDS = ("WordPiece", "BPE", "Unigram", "WordLevel")
FILE = "tokenizer.json"
OF_TOKENS = "_token_id"  # ending of the keys of a configuration that hold a token

Array = np.ndarray[Any, Any]


def check_trimmable(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise a `UsageError` for a tokenizer whose segmentation cannot be kept."""
    if not tokenizer.is_fast:
        message = f"the tokenizer of {source} is {type(tokenizer).__name__}, which has no {FILE}"
        raise UsageError(message, "a vocabulary is cut in a fast tokenizer")
    model = _description(tokenizer)["model"]
    if model["type"] not in KINDS:
        raise UsageError(
            f"the tokenizer of {source} is of kind {model['type']}", f"known: {', '.join(KINDS)}"
        )
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model["type"] == "BPE" and model.get(name):
            raise UsageError(
                f"the BPE of {source} has {name}={model[name]!r}, with which no vocabulary is cut"
            )


def needed_by(tokenizer: PreTrainedTokenizerBase) -> Callable[[Iterable[int]], Array]:
    """A function from ids to those to keep so that texts of these are segmented as before, sorted:
    these, what BPE makes them of, added and special tokens, single characters and bytes."""
    whole = _description(tokenizer)
    model, number = whole["model"], tokenizer.get_vocab()
    always = {added["id"] for added in whole["added_tokens"]} | set(tokenizer.all_special_ids)
    prefix = model.get("continuing_subword_prefix") or ""
    always |= {
        n for token, n in number.items() if len(token.removeprefix(prefix)) == 1 or _is_byte(token)
    }
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


def cut_tokenizer(tokenizer: PreTrainedTokenizerBase, kept: Array) -> PreTrainedTokenizerBase:
    """The tokenizer of some of the tokens, numbered in the order of `kept`, ids of `needed_by`."""
    whole, place = _description(tokenizer), {int(old): new for new, old in enumerate(kept)}
    model = whole["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [row for old, row in enumerate(model["vocab"]) if old in place]
        model["unk_id"] = None if model["unk_id"] is None else place[model["unk_id"]]
    else:
        model["vocab"] = {
            token: place[old] for token, old in model["vocab"].items() if old in place
        }
    if model["type"] == "BPE":
        there = model["vocab"]
        model["merges"] = [
            [a, b] for a, b in _merges(model) if a in there and b in there and a + b in there
        ]
    for added in whole["added_tokens"]:
        added["id"] = place[added["id"]]
    if whole.get("padding"):
        whole["padding"]["pad_id"] = place[whole["padding"]["pad_id"]]
    _renumber(whole.get("post_processor"), place)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        settings = json.loads((Path(folder) / "tokenizer_config.json").read_text("utf-8"))
        # Lists of tokens in other files would be read next to this one.
        for file in Path(folder).iterdir():
            file.unlink()
        settings.pop("added_tokens_decoder", None)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
        (Path(folder) / FILE).write_text(json.dumps(whole, ensure_ascii=False), "utf-8")
        cut = load_tokenizer(folder)
    # Some classes build a Unigram model of their own, in which the unknown token has a fixed place.
    same_unknown = _description(cut)["model"].get("unk_id") == model.get("unk_id")
    if not same_unknown or cut.convert_ids_to_tokens(
        range(len(kept))
    ) != tokenizer.convert_ids_to_tokens(kept.tolist()):
        raise UsageError(
            f"{type(tokenizer).__name__} does not keep its tokens in {FILE}, so they cannot be cut"
        )
    cut.name_or_path = tokenizer.name_or_path
    return cut


def cut_model(model: PreTrainedModel, kept: Array) -> PreTrainedModel:
    """A model with the rows `kept` of its tables of tokens, heads over the vocabulary included, and
    everything else shared. `kept` holds those of `named_in`. Raises UsageError: its table has no
    row for one of the tokens."""
    rows = int(model.config.vocab_size)
    if kept[-1] >= rows:
        raise UsageError(
            f"the tokenizer has token {kept[-1]}, the model has rows for {rows:,}",
            "are they a pair?",
        )
    place, config = {int(old): new for new, old in enumerate(kept)}, copy.deepcopy(model.config)
    config.vocab_size = len(kept)
    for name, value in _ids_in(model.config.to_dict(), rows).items():
        setattr(config, name, place[value])
    if unilm := getattr(config, UNILM, None):
        setattr(
            config,
            UNILM,
            unilm | {name: place[value] for name, value in _ids_in(unilm, rows).items()},
        )
    if words := getattr(config, LABEL_WORDS, None):
        setattr(config, LABEL_WORDS, words | {"ids": [place[n] for n in words["ids"]]})
    cut, at = empty_model(type(model), config), torch.from_numpy(kept)
    shapes = {name: tensor.shape for name, tensor in cut.state_dict().items()}
    tensors = {
        name: t if t.shape == shapes[name] else t[at] for name, t in model.state_dict().items()
    }
    cut = load_tensors(cut, tensors, model.base_model)
    if decoding := getattr(model, "generation_config", None):
        cut.generation_config = copy.deepcopy(decoding)
        cut.generation_config.update(
            **{n: place[value] for n, value in _ids_in(decoding.to_dict(), rows).items()}
        )
    return cut


def named_in(config: PreTrainedConfig) -> set[int]:
    """The tokens that a configuration names."""
    ids = _ids_in(config.to_dict() | (getattr(config, UNILM, None) or {}), config.vocab_size)
    return {*ids.values(), *(getattr(config, LABEL_WORDS, None) or {"ids": ()})["ids"]}


def _ids_in(settings: Mapping[str, Any], rows: int) -> dict[str, int]:
    """Key -> token; some defaults lie beyond a small vocabulary and mean nothing."""
    found = {name: value for name, value in settings.items() if name.endswith(OF_TOKENS)}
    return {n: v for n, v in found.items() if isinstance(v, int) and 0 <= v < rows}


def _description(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return found


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of a BPE model in the order of their ranks, in the old form of texts or the new one
    of lists."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _parts(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Every token on BPE's way from the characters to a token."""
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
    """Give the tokens that a post-processor adds their new ids."""
    if not isinstance(processor, dict):
        return
    for inner in processor.get("processors", ()):
        _renumber(inner, place)
    for name in ("sep", "cls"):
        if name in processor:
            processor[name][1] = place[processor[name][1]]
    for added in (processor.get("special_tokens") or {}).values():
        added["ids"] = [place[n] for n in added["ids"]]


def counted(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Array:
    """How often each token occurs in some texts, [V]; special tokens that frame a text are not
    counted."""
    rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    ids = np.fromiter((n for row in rows for n in row), np.int64)
    return np.bincount(ids, minlength=len(tokenizer))
