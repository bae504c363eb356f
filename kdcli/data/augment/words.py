"""Words of a text as spans of its characters, and the words that are one token of a tokenizer.

A word is a run of letters and the marks on them; what holds a digit is none. Of runs joined by an
apostrophe only a later one of three letters or more is a word: `homme` of "l'homme", nothing of
"don't". In scripts without spaces the pieces of the tokenizer are the words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import regex  # type: ignore[import-untyped]
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from kdcli.errors import UsageError

# Thai, Lao, Burmese, Khmer, Kana; Han.
_SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff"
_SPACELESS += r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
SPACELESS = regex.compile(f"[{_SPACELESS}]")
_MARKS = r"[\p{M}\u200c\u200d]*"
_PART = rf"(?P<part>(?:[[\p{{L}}--[{_SPACELESS}]]\p{{N}}_]{_MARKS})+)"
_RUNS = regex.compile(
    rf"(?V1){_PART}(?:['’]{_PART})*|(?P<spaceless>(?:[[{_SPACELESS}]&&[\p{{L}}\p{{M}}]]{_MARKS})+)"
)
_DIGIT = regex.compile(r"[\p{N}_]")
_AFTER_APOSTROPHE = 3
IDS_ONLY: dict[str, bool] = dict.fromkeys(
    ("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose"), False
)


@dataclass(frozen=True)
class Word:
    """Characters `begin` to `end` - 1 of a text."""

    begin: int
    end: int
    spaceless: bool  # of a script without spaces
    token: int | None = (
        None  # number of its token within the text; None if it is several tokens or an unknown one
    )


@dataclass(frozen=True)
class Read:
    """A text under a tokenizer: ids without special tokens, and its words."""

    ids: list[int]
    words: list[Word]


def words_in(text: str) -> list[Word]:
    """The words of a text; a run of a script without spaces counts as one."""
    words = []
    for run in _RUNS.finditer(text):
        parts = run.spans("part")
        if not parts:
            words.append(Word(run.start(), run.end(), True))
        elif not _DIGIT.search(run[0]):
            kept = (
                [(b, e) for b, e in parts[1:] if e - b >= _AFTER_APOSTROPHE]
                if len(parts) > 1
                else parts
            )
            words += [Word(begin, end, False) for begin, end in kept]
    return words


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UsageError for a tokenizer written in Python: it does not tell which characters a
    token stands for."""
    if not tokenizer.is_fast:
        message = "does not tell which characters a token stands for, as augmentation needs"
        hint = (
            "use a model with a tokenizer.json (a fast tokenizer), or name another masked language "
            "model"
        )
        raise UsageError(f"{type(tokenizer).__name__} {message}", hint)


def read(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Read]:
    """Texts as tokens and words; the tokenizer must pass `check_fast`."""
    check_fast(tokenizer)
    if not texts:
        return []
    encoded = tokenizer(list(texts), return_offsets_mapping=True, truncation=False, **IDS_ONLY)
    prefix = _continuation(tokenizer)
    reads = []
    for text, ids, offsets in zip(
        texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        pieces = (
            tokenizer.convert_ids_to_tokens(ids)
            if prefix and SPACELESS.search(text)
            else [""] * len(ids)
        )
        tokens = [
            (
                *_trimmed(text, begin, end),
                bool(prefix) and piece.startswith(prefix),
                i != tokenizer.unk_token_id,
            )
            for (begin, end), piece, i in zip(offsets, pieces, ids, strict=True)
        ]
        reads.append(Read(ids, list(_words(text, tokens))))
    return reads


def _continuation(tokenizer: PreTrainedTokenizerBase) -> str:
    """The prefix of pieces within a word; empty where the tokenizer marks the beginnings of words
    instead."""
    return str(getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None) or "")


def _trimmed(text: str, begin: int, end: int) -> tuple[int, int]:
    """The characters of a token without the spaces that some tokenizers count in."""
    left = end - len(text[begin:end].lstrip())
    return left, left + len(text[left:end].rstrip())


def _words(text: str, tokens: Sequence[tuple[int, int, bool, bool]]) -> Iterator[Word]:
    """Words with their tokens; of each token: begin, end, whether it goes on a word, whether it is
    a known one."""
    first = 0
    for word in words_in(text):
        while first < len(tokens) and tokens[first][1] <= word.begin:
            first += 1
        groups: list[list[int]] = []
        reach = word.begin
        for place in range(first, len(tokens)):
            begin, end, continues, _ = tokens[place]
            if begin >= word.end:
                break
            if begin < end:
                # Bytes of one character are tokens that stand for the same character.
                if not groups or (word.spaceless and begin >= reach and not continues):
                    groups.append([])
                groups[-1].append(place)
                reach = max(reach, end)
        for group in groups:
            begin, end = tokens[group[0]][0], max(tokens[place][1] for place in group)
            own = (
                (max(begin, word.begin), min(end, word.end))
                if word.spaceless
                else (word.begin, word.end)
            )
            alone = len(group) == 1 and tokens[group[0]][3] and (begin, end) == own
            yield Word(*own, word.spaceless, group[0] if alone else None)


def whole_words(tokenizer: PreTrainedTokenizerBase) -> dict[int, tuple[str, bool]]:
    """Token id -> the word that it alone is in a text, and whether its script has no spaces. Left
    out are special and added tokens, pieces within words, tokens with anything but letters, and
    tokens whose word the tokenizer would encode in another way. The tokenizer must pass
    `check_fast`."""
    check_fast(tokenizer)
    prefix, suffix = (
        _continuation(tokenizer),
        getattr(tokenizer.backend_tokenizer.model, "end_of_word_suffix", None),
    )
    is_bytes = "ByteLevel" in repr(tokenizer.backend_tokenizer.pre_tokenizer)
    decoder = decoders.ByteLevel()
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    spelled: dict[int, str] = {}
    for piece, number in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if number not in special and not (prefix and piece.startswith(prefix)):
            spelled[number] = decoder.decode([piece]) if is_bytes else piece.replace("▁", " ")
    marked = not prefix and any(word.startswith(" ") for word in spelled.values())
    spaced, spaceless = {}, {}
    for number, spelling in spelled.items():
        text = spelling.removesuffix(suffix or "").removeprefix(" ")
        words = words_in(text)
        if len(words) != 1 or (words[0].begin, words[0].end) != (0, len(text)):
            continue
        if words[0].spaceless and not spelling.startswith(" "):
            spaceless[number] = (text, True)
        elif not words[0].spaceless and (spelling.startswith(" ") or not marked):
            spaced[number] = text
    return {
        number: (word, False) for number, word in _encoded_as_themselves(tokenizer, spaced).items()
    } | spaceless


def _encoded_as_themselves(
    tokenizer: PreTrainedTokenizerBase, words: dict[int, str]
) -> dict[int, str]:
    """The words whose encoding is this very token; some need a space before, some must not have
    one."""
    kept: dict[int, str] = {}
    for before in (" ", ""):
        rest = {number: word for number, word in words.items() if number not in kept}
        if rest:
            texts = [before + word for word in rest.values()]
            ids = tokenizer(texts, **IDS_ONLY)["input_ids"]
            kept |= {
                n: word
                for (n, word), encoded in zip(rest.items(), ids, strict=True)
                if encoded == [n]
            }
    return dict(sorted(kept.items()))
