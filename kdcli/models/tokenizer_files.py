"""Check a tokenizer: its files before the library reads them, and the ids that it makes.

tokenizer.json is a program for texts. The library runs it without bounds, so one that grows texts
would take all memory.
"""

import base64
import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from kdcli.disk import read_json
from kdcli.errors import UsageError, shortened
from kdcli.models.files import file_of
from kdcli.models.model import TYPE_IDS

TOKENIZER_FILE = "tokenizer.json"
ADDED_FILE = "added_tokens.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    ADDED_FILE,
    "vocab.json",
)
TOKENIZER_BYTES = 100_000_000
ADDED_KEYS = (
    "added_tokens",
    "added_tokens_decoder",
    "extra_special_tokens",
    "additional_special_tokens",
)
"""Keys of lists and tables of added tokens."""
MAX_ADDED_TOKENS = 20_000
"""transformers needs time quadratic in them."""
MAX_STEPS = 1_000
"""Maximum number of steps in a normalizer or a pre-tokenizer, and of pieces in a template."""
MAX_TEXT = 1_000
"""Maximum number of characters of a text that a step inserts."""
MAX_WORD = 10_000
"""Maximum number of characters of a word; WordPiece's time is quadratic in it."""
MAX_GROWTH = 100
"""How much longer the steps may make a text."""
MEMBERS = ("normalizers", "pretokenizers", "processors")
"""Keys of the steps in a sequence of steps."""
INSERTED = ("content", "prepend", "replacement", "continuing_subword_prefix", "end_of_word_suffix")
"""Keys of texts that a step inserts."""
SEQUENCES = {"single": ["A"], "pair": ["A", "B"]}
"""Template -> the texts that it may contain, each at most once."""
RUNS = " ".join(letter * 32 for letter in string.ascii_lowercase)
PROBE = f"{string.printable} \u00e9\u00df\u4e2d\u6587\U0001f600 {RUNS}"
"""A text with characters of many kinds, on which a tokenizer is tried. Long runs of a letter show
patterns that take forever."""
LISTED_TOKENS = 5
AS_LOADED = "kdcli_as_loaded"
"""Attribute of a tokenizer that holds truncation and padding before any call."""
ORIGINAL_HINT = "use the tokenizer of the original model"
TEMPLATE_HINT = "correct the post_processor in the tokenizer.json of a copy of the model"


def check_tokenizer(source: str) -> None:
    """Check a tokenizer's JSON files.

    Raises UsageError if a file is damaged, too large or nested too deeply, or if tokenizer.json
    would make texts much longer.
    """
    for name in TOKENIZER_FILES:
        if (file := file_of(source, name)) is not None:
            tree = read_json(file, max_bytes=TOKENIZER_BYTES)
            for tokens in (tree if name == ADDED_FILE else (), *map(tree.get, ADDED_KEYS)):
                if isinstance(tokens, dict | list) and len(tokens) > MAX_ADDED_TOKENS:
                    raise UsageError(
                        f"{file} has {len(tokens):,} added tokens, at most {MAX_ADDED_TOKENS:,} "
                        "are allowed",
                        ORIGINAL_HINT,
                    )
            if tree.get("unk_token") == "":
                # transformers would look for its id without an end.
                raise UsageError(f"{file}: unk_token must not be empty", ORIGINAL_HINT)
            if name == TOKENIZER_FILE:
                _check_steps(tree, file)


def _check_steps(tree: Mapping[str, Any], file: Path) -> None:
    """Check what tokenizer.json does with texts. The library reports values of a wrong type."""

    def refuse(reason: str) -> NoReturn:
        raise UsageError(f"{file}: {reason}", ORIGINAL_HINT)

    model = tree.get("model")
    steps = {key: _steps(tree.get(key)) for key in ("normalizer", "pre_tokenizer")}
    processors = _steps(tree.get("post_processor"))
    for step in (*steps["normalizer"], *steps["pre_tokenizer"], *_steps(model)):
        for key in INSERTED:
            if isinstance(step.get(key), str) and len(step[key]) > MAX_TEXT:
                refuse(f"{key} has {len(step[key]):,} characters, at most {MAX_TEXT:,} are allowed")
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(longest, int) and longest > MAX_WORD:
        refuse(f"max_input_chars_per_word must be at most {MAX_WORD:,}, got {longest:,}")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict) and not _are_numbered(vocabulary):
        # The library would choose one of the tokens at random for what the id stands for.
        refuse("two tokens of its vocabulary have the same id")
    if isinstance(model, dict) and model.get("dropout"):
        refuse(f"its model tokenises at random (dropout={model['dropout']})")
    for each in (*steps.values(), processors):
        if len(each) > MAX_STEPS:
            refuse(f"it has {len(each):,} steps in a row, at most {MAX_STEPS:,} are allowed")
    for processor in processors:
        for name, texts in SEQUENCES.items():
            if (reason := _misfit_of_template(processor, name, texts)) is not None:
                refuse(reason)
    text = PROBE + "".join(map(_pattern_of, steps["normalizer"]))
    limit = MAX_GROWTH * len(text)
    for key, of_key in steps.items():
        for step in of_key:
            text = _applied(key, step, text)
            if len(text) > limit:
                refuse(f"its {key} makes some texts more than {MAX_GROWTH} times as long")


def _are_numbered(vocabulary: Mapping[str, Any]) -> bool:
    """Return whether no two tokens have the same id. The library reports ids of a wrong type."""
    ids = [number for number in vocabulary.values() if isinstance(number, int)]
    return len(set(ids)) == len(ids)


def _steps(step: object) -> list[Mapping[str, Any]]:
    """Return the steps of a sequence of steps, which may hold sequences itself."""
    if not isinstance(step, dict):
        return []
    members = [step[key] for key in MEMBERS if isinstance(step.get(key), list)]
    if not members:
        return [step]
    return [inner for member in members[0] for inner in _steps(member)]


def _pattern_of(step: Mapping[str, Any]) -> str:
    """Return the plain text that a step replaces, or an empty text."""
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return text[:MAX_TEXT] if isinstance(text, str) else ""


def _misfit_of_template(
    processor: Mapping[str, Any], name: str, texts: Sequence[str]
) -> str | None:
    """Return why a template cannot be used, or None."""
    pieces, tokens = processor.get(name), processor.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(tokens, dict):
        return None
    inside = [piece["Sequence"].get("id") for piece in pieces if "Sequence" in piece]
    if not set(inside) <= set(texts) or len(set(inside)) < len(inside):
        return (
            f"the template '{name}' of its post_processor may contain the texts "
            f"{' and '.join(texts)} once each, got {shortened(', '.join(map(str, inside)), 60)}"
        )
    if not inside:
        return f"the template '{name}' of its post_processor leaves out the text"
    names = [piece["SpecialToken"].get("id") for piece in pieces if "SpecialToken" in piece]
    count = sum(len(tokens[token].get("ids", ())) for token in names if token in tokens)
    if count > MAX_STEPS:
        return (
            f"the template '{name}' of its post_processor adds {count:,} tokens, at most "
            f"{MAX_STEPS:,} are allowed"
        )
    return None


def _applied(key: str, step: Mapping[str, Any], text: str) -> str:
    """Return a text after a step of a normalizer or of a pre-tokenizer."""
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        data = base64.b64decode(charsmap)
        if int.from_bytes(data[:4], "little") > len(data) - 4:
            # The library would allocate what the damaged header declares.
            raise ValueError("its precompiled_charsmap is damaged")
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    alone = Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, key: step}))
    if key == "normalizer":
        return str(alone.normalizer.normalize_str(text))
    return "".join(part for part, _ in alone.pre_tokenizer.pre_tokenize_str(text))


def check_ids(
    tokenizer: PreTrainedTokenizerBase,
    probes: Sequence[BatchEncoding],
    source: str,
    sizes: Mapping[str, int],
) -> None:
    """Check that a model has an embedding for every token, place and token type of its tokenizer.

    transformers gives a new id to a special token that is not in the vocabulary, and the templates
    of tokenizer.json name ids apart from the vocabulary.

    Args:
        tokenizer: The tokenizer.
        probes: A text and a pair of texts, tokenised.
        source: The model, for messages.
        sizes: The sizes that the model's files declare, by their keys in config.json.

    Raises:
        UsageError: The model lacks a token or a token type, or reads fewer tokens than the
            tokenizer adds to a text.
    """
    vocabulary, size = tokenizer.get_vocab(), sizes.get("vocab_size", VERY_LARGE_INTEGER)
    beyond = [token for token, number in vocabulary.items() if number >= size]
    if beyond:
        raise UsageError(
            f"the tokenizer of {source} has {len(vocabulary):,} tokens, but the model has only "
            f"{size:,}: it lacks {', '.join(map(repr, sorted(beyond)[:LISTED_TOKENS]))}"
            f"{' ...' if len(beyond) > LISTED_TOKENS else ''}",
            "add them to a copy of the model with resize_token_embeddings and train it, or remove "
            "them from its tokenizer",
        )
    number = max(n for probe in probes for n in (0, *probe["input_ids"]))
    if number >= size:
        raise UsageError(
            f"the tokenizer of {source} puts the token {number:,} around texts, but the model has "
            f"only {size:,} tokens",
            TEMPLATE_HINT,
        )
    types = sizes.get("type_vocab_size", 0)
    number = max(n for probe in probes for n in (0, *probe.get(TYPE_IDS, ())))
    if TYPE_IDS in tokenizer.model_input_names and number >= types > 1:
        raise UsageError(
            f"the tokenizer of {source} gives the token type {number}, but the model has only "
            f"{types} types",
            TEMPLATE_HINT,
        )
    positions = sizes.get("max_position_embeddings", -1)
    length = min(tokenizer.model_max_length, positions if positions > 0 else VERY_LARGE_INTEGER)
    added = tokenizer.num_special_tokens_to_add()
    if added > length:
        raise UsageError(
            f"the tokenizer of {source} adds {added:,} special tokens to a text, but the model "
            f"reads only {length:,} tokens",
            TEMPLATE_HINT,
        )
