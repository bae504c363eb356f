"""Find the words of a text, and the words that are a single token of a tokenizer.

A word is a run of letters and their combining marks. A run with a digit is not a word. In runs
joined by apostrophes, only later runs of at least three letters are words: `homme` in "l'homme",
and none in "don't". In scripts without spaces, the words are the pieces of the tokenizer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import regex  # type: ignore[import-untyped]
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from kdcli.data.labelled.features import cover_letters
from kdcli.errors import UsageError

# Thai, Lao, Burmese, Khmer and Kana, then Han.
_SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff"
_SPACELESS += r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
SPACELESS = regex.compile(f"[{_SPACELESS}]")
_MARKS = r"[\p{M}\u200c\u200d]*"
_PART = rf"(?P<part>(?:[[\p{{L}}--[{_SPACELESS}]]\p{{N}}_]{_MARKS})+)"
_RUNS = regex.compile(
    rf"(?V1){_PART}(?:['’]{_PART})*|(?P<spaceless>(?:[[{_SPACELESS}]&&[\p{{L}}\p{{M}}]]{_MARKS})+)"
)
_DIGIT = regex.compile(r"[\p{N}_]")
_MIN_AFTER_APOSTROPHE = 3  # Letters of a word after an apostrophe.
IDS_ONLY: dict[str, bool] = dict.fromkeys(
    ("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose"), False
)


@dataclass(frozen=True)
class Word:
    """A word of a text.

    Attributes:
        begin, end: The first character, and the character after the last.
        spaceless: Whether the script has no spaces.
        token: The index of the word's token in the text; None if it has several tokens, or if the
            token is the unknown one.
    """

    begin: int
    end: int
    spaceless: bool
    token: int | None = None


@dataclass(frozen=True)
class TokenizedWords:
    """The token ids of a text, without special tokens, and its words."""

    ids: list[int]
    words: list[Word]


def words_in(text: str) -> list[Word]:
    """Find the words of a text. A run of a script without spaces counts as one word."""
    words = []
    for run in _RUNS.finditer(text):
        parts = run.spans("part")
        if not parts:
            words.append(Word(run.start(), run.end(), True))
        elif not _DIGIT.search(run[0]):
            if len(parts) > 1:
                parts = [(b, e) for b, e in parts[1:] if e - b >= _MIN_AFTER_APOSTROPHE]
            words += [Word(begin, end, False) for begin, end in parts]
    return words


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a UsageError if a tokenizer does not tell which characters a token stands for.

    Tokenizers written in Python do not.
    """
    if not tokenizer.is_fast:
        message = (
            "does not tell which characters a token stands for, but augmentation needs to know"
        )
        hint = (
            "use a model with a tokenizer.json (a fast tokenizer), or give another masked language "
            "model"
        )
        raise UsageError(f"{type(tokenizer).__name__} {message}", hint)


def tokenize_words(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[TokenizedWords]:
    """Tokenise texts, and find their words. The tokenizer must pass `check_fast`."""
    check_fast(tokenizer)
    if not texts:
        return []
    encoded = tokenizer(list(texts), return_offsets_mapping=True, truncation=False, **IDS_ONLY)
    prefix = _continuation_prefix(tokenizer)
    tokenized = []
    for text, ids, offsets in zip(
        texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        pieces = [""] * len(ids)
        if prefix and SPACELESS.search(text):
            pieces = tokenizer.convert_ids_to_tokens(ids)
        (places,) = cover_letters(text, [np.array(offsets, np.int32).reshape(-1, 2)])
        tokens = [
            (
                *_trimmed(text, begin, end),
                bool(prefix) and piece.startswith(prefix),
                i != tokenizer.unk_token_id,
            )
            for (begin, end), piece, i in zip(places.tolist(), pieces, ids, strict=True)
        ]
        tokenized.append(TokenizedWords(ids, list(_words(text, tokens))))
    return tokenized


def _continuation_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prefix of pieces within a word.

    It is empty if the tokenizer marks the beginnings of words instead.
    """
    return str(getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None) or "")


def _trimmed(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the characters of a token without the spaces that some tokenizers include."""
    left = end - len(text[begin:end].lstrip())
    return left, left + len(text[left:end].rstrip())


def _words(text: str, tokens: Sequence[tuple[int, int, bool, bool]]) -> Iterator[Word]:
    """Yield the words with their tokens.

    A token is given as its begin, its end, whether it continues a word, and whether it is known.
    """
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
                # Tokens that are bytes of one character all stand for this character.
                if not groups or (word.spaceless and begin >= reach and not continues):
                    groups.append([])
                groups[-1].append(place)
                reach = max(reach, end)
        for group in groups:
            begin = tokens[group[0]][0]
            end = max(tokens[place][1] for place in group)
            span = (word.begin, word.end)
            if word.spaceless:
                span = (max(begin, word.begin), min(end, word.end))
            is_one_token = len(group) == 1 and tokens[group[0]][3] and (begin, end) == span
            yield Word(*span, word.spaceless, group[0] if is_one_token else None)


def whole_words(tokenizer: PreTrainedTokenizerBase) -> dict[int, tuple[str, bool]]:
    """Find the tokens that are whole words.

    Special and added tokens, pieces within words, and tokens with other characters than letters are
    skipped. Tokens whose word the tokenizer encodes differently are skipped, too. The tokenizer
    must pass `check_fast`.

    Returns:
        Token id -> its word, and whether the word's script has no spaces.
    """
    check_fast(tokenizer)
    prefix = _continuation_prefix(tokenizer)
    suffix = getattr(tokenizer.backend_tokenizer.model, "end_of_word_suffix", None)
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
    """Keep the words that are encoded as their own token, either with or without a space before."""
    kept: dict[int, str] = {}
    for space in (" ", ""):
        rest = {number: word for number, word in words.items() if number not in kept}
        if rest:
            texts = [space + word for word in rest.values()]
            ids = tokenizer(texts, **IDS_ONLY)["input_ids"]
            kept |= {
                n: word
                for (n, word), encoded in zip(rest.items(), ids, strict=True)
                if encoded == [n]
            }
    return dict(sorted(kept.items()))
