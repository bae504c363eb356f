"""Words of a text as spans of its characters, and the words that stand whole in a tokenizer's vocabulary.

A word is a run of letters and the marks on them. Numbers, punctuation and what holds a digit are no words. Of runs
joined by an apostrophe only a later one of three letters or more is one: `homme` of "l'homme", nothing of "don't" or
"it's", whose parts mean nothing alone. Scripts that are written without spaces have the pieces of the tokenizer as
words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from kdcli.errors import UsageError

SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Thai, Lao, Burmese, Khmer, Kana, Han."""

_JOINERS = "\u200c\u200d"
_APOSTROPHES = "'’"
_RUNS = re.compile("[ad]+(?:'[ad]+)*|s+")
_AFTER_APOSTROPHE = 3
_SPACE = "▁"


@dataclass(frozen=True)
class Span:
    """Where a word stands: characters `begin` … `end - 1` of its text; `spaceless` where its script is."""

    begin: int
    end: int
    spaceless: bool


@dataclass(frozen=True)
class Word:
    """A word under a tokenizer: its span, and which token of its text it is; None where it is several, or unknown."""

    span: Span
    token: int | None


@dataclass(frozen=True)
class Read:
    """A text as a tokenizer reads it: ids without special tokens, and its words."""

    ids: list[int]
    words: list[Word]


def spans_in(text: str) -> list[Span]:
    """The words of a text; a run of a script without spaces counts as one."""
    found = []
    for run in _RUNS.finditer(_classes(text)):
        if run[0][0] == "s":
            found.append(Span(run.start(), run.end(), True))
        elif "d" not in run[0] and "'" not in run[0]:
            found.append(Span(run.start(), run.end(), False))
        elif "d" not in run[0]:
            for part in re.finditer("'(a+)", run[0]):
                begin, end = (run.start() + place for place in part.span(1))
                if end - begin >= _AFTER_APOSTROPHE:
                    found.append(Span(begin, end, False))
    return found


def _classes(text: str) -> str:
    """A character for each of the text's: `a` letter, `s` letter of a script without spaces, `d` digit, `'`, or `.`;
    a mark is what stands before it."""
    before, found = ".", []
    for character in text:
        if character.isascii():
            before = _class_of(character)
        elif unicodedata.category(character)[0] == "M" or character in _JOINERS:
            # Vowels of Thai and its like are marks too, of their own script.
            before = "s" if before == "." and SPACELESS.match(character) else before
        else:
            before = "s" if SPACELESS.match(character) and character.isalpha() else _class_of(character)
        found.append(before)
    return "".join(found)


def _class_of(character: str) -> str:
    if character.isalpha():
        return "a"
    if character.isnumeric() or character == "_":
        return "d"
    return "'" if character in _APOSTROPHES else "."


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that does not tell which characters a token stands for.

    Raises:
        UsageError: it is one written in Python.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not tell which characters a token stands for, as augmentation needs",
            "use a model with a tokenizer.json (a fast tokenizer), or name another masked language model",
        )


def read(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Read]:
    """Texts as tokens and words; spans count characters of the text as it was given.

    Raises:
        UsageError: see `check_fast`.
    """
    check_fast(tokenizer)
    if not texts:
        return []
    found = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        verbose=False,
    )
    prefix = _continuation(tokenizer)
    made = []
    for text, ids, offsets in zip(texts, found["input_ids"], found["offset_mapping"], strict=True):
        pieces = tokenizer.convert_ids_to_tokens(ids) if prefix and SPACELESS.search(text) else []
        continued = [piece.startswith(prefix) for piece in pieces] or [False] * len(ids)
        known = [i != tokenizer.unk_token_id for i in ids]
        made.append(Read(ids, list(_words(text, [_trimmed(text, *o) for o in offsets], continued, known))))
    return made


def _continuation(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a piece begins with that goes on a word; empty where the tokenizer marks the beginnings instead."""
    return str(getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None) or "")


def _trimmed(text: str, begin: int, end: int) -> tuple[int, int]:
    """The characters of a token without the spaces that some tokenizers count in."""
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return begin, end


def _words(
    text: str, offsets: Sequence[tuple[int, int]], continued: Sequence[bool], known: Sequence[bool]
) -> Iterator[Word]:
    first = 0
    for span in spans_in(text):
        while first < len(offsets) and offsets[first][1] <= span.begin:
            first += 1
        inside = first
        groups: list[list[int]] = []
        reach = span.begin
        while inside < len(offsets) and offsets[inside][0] < span.end:
            begin, end = offsets[inside]
            if begin < end:
                # Bytes of one character are tokens that stand for the same character.
                apart = span.spaceless and begin >= reach and not continued[inside]
                if apart or not groups:
                    groups.append([])
                groups[-1].append(inside)
                reach = max(reach, end)
            inside += 1
        for group in groups:
            begin, end = offsets[group[0]][0], max(offsets[t][1] for t in group)
            own = Span(max(begin, span.begin), min(end, span.end), True) if span.spaceless else span
            alone = len(group) == 1 and known[group[0]] and (begin, end) == (own.begin, own.end)
            yield Word(own, group[0] if alone else None)


def whole_words(tokenizer: PreTrainedTokenizerBase) -> dict[int, tuple[str, bool]]:
    """Token id → the word that it alone is in a text, and whether its script is one without spaces.

    No special or added tokens, no pieces that go on a word, none that hold anything but letters, and none that the
    tokenizer itself would write in another way.

    Raises:
        UsageError: see `check_fast`.
    """
    check_fast(tokenizer)
    prefix, suffix = _continuation(tokenizer), getattr(tokenizer.backend_tokenizer.model, "end_of_word_suffix", None)
    is_bytes = "ByteLevel" in repr(tokenizer.backend_tokenizer.pre_tokenizer)
    decoder = decoders.ByteLevel()
    aside = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    spelled: dict[int, str] = {}
    for piece, number in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if number not in aside and not (prefix and piece.startswith(prefix)):
            spelled[number] = decoder.decode([piece]) if is_bytes else piece.replace(_SPACE, " ")
    marked = not prefix and any(word.startswith(" ") for word in spelled.values())
    spaced, spaceless = {}, {}
    for number, spelling in spelled.items():
        word = spelling.removesuffix(suffix or "").removeprefix(" ")
        spans = spans_in(word)
        if len(spans) != 1 or (spans[0].begin, spans[0].end) != (0, len(word)):
            continue
        if spans[0].spaceless and not spelling.startswith(" "):
            spaceless[number] = word
        elif not spans[0].spaceless and (spelling.startswith(" ") or not marked):
            spaced[number] = word
    kept = _read_back(tokenizer, spaced)
    return {number: (word, False) for number, word in kept.items()} | {n: (w, True) for n, w in spaceless.items()}


def _read_back(tokenizer: PreTrainedTokenizerBase, words: dict[int, str]) -> dict[int, str]:
    """Those words that the tokenizer makes this very token of; some need a space before, some must not have one."""
    kept: dict[int, str] = {}
    for before in (" ", ""):
        rest = {number: word for number, word in words.items() if number not in kept}
        if rest:
            texts = [before + word for word in rest.values()]
            ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            kept |= {n: word for (n, word), found in zip(rest.items(), ids, strict=True) if found == [n]}
    return dict(sorted(kept.items()))
