"""Tokenise labelled examples into rows of token ids.

The rows are stored without padding, which is added batch by batch.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import DTypeLike
from transformers import BatchEncoding, PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.types import IGNORED, Array, Batch, Example, Kind, Task

EXAMPLES_PER_CALL = 4096
"""Number of examples tokenised at once. It bounds the memory of the tokenizer's objects."""
MAX_LENGTH = 1 << 30
"""The largest `max_length` of a fast tokenizer, which is less than VERY_LARGE_INTEGER."""
BY_TOKEN = ("tokens", "text")  # Kinds with a label for each token.
MIN_SOURCE_TOKENS = 8


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of token ids with their labels; an `Examples` of `kdcli.types`.

    Attributes:
        ids_T: The ids of all rows, one after another, int32.
        types_T: The token types, int8; None if the model has none.
        ends: Where each row ends in `ids_T`, [rows] int64.
        labels: The label of each row, as described at `kdcli.types.Kind`. For the kinds in
            `BY_TOKEN`, the label of each token in `ids_T`. None if the labels are withheld.
        example: The example of each row, [rows] int64. An example may have several rows (windows).
        truncated: The number of examples that were truncated.
        pad_id: The id of the padding token.
        kind: The kind of the task.
        words_T: For `tokens`, the number of the word that begins at a token, or -1; int32.
        sources: For `text`, the number of tokens of each row's source, [rows] int64.
    """

    ids_T: Array
    types_T: Array | None
    ends: Array
    labels: Array | None
    example: Array
    truncated: int
    pad_id: int
    kind: Kind
    words_T: Array | None = None
    sources: Array | None = None

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Array:
        """The number of tokens of each row, [rows] int64."""
        return np.diff(self.ends, prepend=0)

    def batch(self, indices: Array) -> Batch:
        """Collate rows, and pad them on the right to the length of the longest."""
        lengths = self.lengths[indices]
        # Texts without any token are one padding token, because models need at least one.
        width = max(1, int(lengths.max()))
        real_BL = np.arange(width)[None, :] < lengths[:, None]
        tokens = self.places(indices)

        def padded(values_T: Array, filler: int) -> torch.Tensor:
            padded_BL = np.full(real_BL.shape, filler, np.int64)
            padded_BL[real_BL] = values_T[tokens]
            return torch.from_numpy(padded_BL)

        batch = {
            "input_ids": padded(self.ids_T, self.pad_id),
            "attention_mask": torch.from_numpy(real_BL.astype("i8")),
        }
        if self.types_T is not None:
            batch["token_type_ids"] = padded(self.types_T, 0)
        if self.sources is not None:
            batch["sources"] = torch.from_numpy(self.sources[indices])
        if self.labels is not None and self.kind in BY_TOKEN:
            batch["labels"] = padded(self.labels, IGNORED)
        elif self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[indices])
        return batch

    def by_length(self) -> Self:
        """Return the rows sorted by length, shortest first, which reduces padding."""
        return self.take(np.argsort(self.lengths, kind="stable"))

    def places(self, rows: Array) -> Array:
        """Return the indices in `ids_T` of the tokens of some rows, row after row."""
        lengths = self.lengths[rows]
        return np.asarray(
            np.arange(lengths.sum()) + np.repeat(self.ends[rows] - np.cumsum(lengths), lengths)
        )

    def take(self, rows: Array) -> Self:
        """Select rows by index, in the given order."""
        at_T = self.places(rows)
        at_labels = at_T if self.kind in BY_TOKEN else rows
        return replace(
            self,
            ids_T=self.ids_T[at_T],
            types_T=None if self.types_T is None else self.types_T[at_T],
            ends=np.cumsum(self.lengths[rows]),
            labels=None if self.labels is None else self.labels[at_labels],
            example=self.example[rows],
            words_T=None if self.words_T is None else self.words_T[at_T],
            sources=None if self.sources is None else self.sources[rows],
        )


def encode_examples(
    task: Task,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    token_types: bool,
) -> TokenizedRows:
    """Tokenise the examples of a task of any kind except `span` and `text`.

    These two kinds have modules of their own.

    Args:
        task: The task.
        examples: Its examples.
        tokenizer: The tokenizer.
        max_length: The maximum number of tokens per row, including special tokens. In a pair, the
            longer text is truncated first.
        token_types: Whether the model distinguishes the texts of a pair by token types.

    Raises:
        UsageError: The tokenizer has no padding token. For `tokens` also: the tokenizer does not
            tell which word a token belongs to, or no labelled word has a token.
    """
    if task.kind == "tokens":
        _check_tells_words(tokenizer, task)
    rows = encode_texts(
        (example.texts for example in examples),
        tokenizer,
        max_length=max_length,
        token_types=token_types,
        kind=task.kind,
    )
    labels = _labels(task, examples, rows)
    if task.kind == "tokens" and labels is not None:
        _check_words_have_tokens(examples, labels)
    return replace(rows, labels=labels)


def encode_texts(
    texts: Iterable[tuple[str, ...]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    token_types: bool,
    kind: Kind = "score",
) -> TokenizedRows:
    """Tokenise texts, or pairs of texts, without labels. For the kind `tokens`, they are words.

    Only the token ids are kept in memory, not the texts.

    Raises:
        UsageError: The tokenizer has no padding token.
    """
    of_words = kind == "tokens"
    ids, types, words, lengths = [list[Array]() for _ in range(4)]
    truncated = 0
    remaining = iter(texts)
    while portion := list(itertools.islice(remaining, EXAMPLES_PER_CALL)):
        encoded = _tokenize(portion, tokenizer, of_words, max_length, token_types)
        ids.append(_joined(encoded["input_ids"], np.int32))
        lengths.append(np.array([len(row) for row in encoded["input_ids"]], np.int64))
        if token_types:
            types.append(_joined(encoded["token_type_ids"], np.int8))
        truncated += sum(were_cut(encoded, max_length))
        if of_words:
            words += [_first_pieces(encoded.word_ids(i)) for i in range(len(portion))]
    lengths_N = _concatenated(lengths, np.int64)
    return TokenizedRows(
        ids_T=_concatenated(ids, np.int32),
        types_T=_concatenated(types, np.int8) if token_types else None,
        ends=np.cumsum(lengths_N),
        labels=None,
        example=np.arange(len(lengths_N)),
        truncated=truncated,
        pad_id=pad_id(tokenizer),
        kind=kind,
        words_T=_concatenated(words, np.int32) if of_words else None,
    )


def _joined(rows: Sequence[Sequence[int]], dtype: DTypeLike) -> Array:
    return np.fromiter(itertools.chain.from_iterable(rows), dtype)


def _concatenated(parts: Sequence[Array], dtype: DTypeLike) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _tokenize(
    texts: Sequence[tuple[str, ...]],
    tokenizer: PreTrainedTokenizerBase,
    of_words: bool,
    max_length: int,
    token_types: bool,
) -> BatchEncoding:
    """Tokenise texts in one call of the tokenizer; `of_words` if they are words."""
    columns = [list(map(list, texts))] if of_words else map(list, zip(*texts, strict=True))
    return tokenizer(
        *columns,
        is_split_into_words=of_words,
        truncation=True,
        max_length=min(max_length, MAX_LENGTH),
        return_token_type_ids=token_types,
        return_attention_mask=False,
        verbose=False,
    )


def _check_tells_words(tokenizer: PreTrainedTokenizerBase, task: Task) -> None:
    """Raise a UsageError if a tokenizer cannot tell which word a token belongs to."""
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not tell which word a token belongs to, but "
            f"{task.title} needs it",
            "use a model with a tokenizer.json (a fast tokenizer)",
        )


def _check_words_have_tokens(examples: Sequence[Example], labels: Array) -> None:
    """Raise a UsageError if no labelled word has a token, so that all labels are IGNORED."""
    if not (labels != IGNORED).any():
        first_words = ", ".join(map(repr, examples[0].texts[:3]))
        raise UsageError(
            f"{examples[0].where}: from here on the tokenizer makes no token of any word, so no "
            "label can be used",
            f"are the words blank? the first are {first_words}",
        )


def were_cut(encoded: BatchEncoding, max_length: int) -> list[bool]:
    """Whether each tokenised row was truncated at `max_length`."""
    if encoded.encodings is None:
        # Slow tokenizers do not tell what they truncate. A full row is counted as truncated.
        return [len(row) >= max_length for row in encoded["input_ids"]]
    return [bool(e.overflowing) for e in encoded.encodings]


def unknown_share(rows: TokenizedRows, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the share of unknown tokens among the tokens of the texts.

    It is 0 for a tokenizer that can write every text, and for one whose unknown token has another
    meaning too, such as the end of a text.
    """
    unknown = tokenizer.unk_token_id
    names = ("pad", "bos", "eos", "cls", "sep", "mask")
    special = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
    if unknown is None or unknown in special:
        return 0.0
    texts = ~np.isin(rows.ids_T, sorted(special))
    return float((rows.ids_T == unknown).sum() / max(1, texts.sum()))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token. Raises UsageError if the tokenizer has no such token."""
    if tokenizer.pad_token_id is None:
        raise UsageError(
            "the tokenizer has no padding token", "set pad_token in its tokenizer_config.json"
        )
    return int(tokenizer.pad_token_id)


def cover_letters(text: str, windows: Sequence[Array]) -> list[Array]:
    """Add letters and digits that no token of any window covers to the token next to them.

    The offsets of some tokenizers begin after the first letter of a word (RobBERT's) or end before
    its last one, although the token stands for it.

    Args:
        text: The text.
        windows: For each window of the text, the first character of each token and the one after
            its last, [L, 2] int32; -1 for tokens of no character.

    Returns:
        The windows with these letters.
    """
    spans = np.concatenate(windows)
    spans = spans[spans[:, 0] >= 0]
    change = np.zeros(len(text) + 1, np.int32)
    np.add.at(change, spans[:, 0], 1)
    np.add.at(change, spans[:, 1], -1)
    covered = np.cumsum(change) > 0
    letters = np.fromiter(map(str.isalnum, text), bool, len(text))
    missed = np.append(letters & ~covered[:-1], False)
    if not missed.any():
        return list(windows)
    first, after = (np.arange(len(text) + 1) for _ in range(2))
    for n in np.flatnonzero(missed):
        first[n + 1] = first[n]
    # A letter before a token belongs to this token, and otherwise to the token before it.
    taken = np.zeros(len(missed), bool)
    for begin in np.unique(spans[:, 0]):
        taken[first[begin] : begin] = True
    for n in np.flatnonzero(missed & ~taken)[::-1]:
        after[n] = after[n + 1]
    return [
        np.where(
            chars_L2 < 0, chars_L2, np.stack([first[chars_L2[:, 0]], after[chars_L2[:, 1]]], axis=1)
        ).astype(np.int32)
        for chars_L2 in windows
    ]


def _first_pieces(words: Sequence[int | None]) -> Array:
    """Return the number of each word at its first piece, and -1 at all other tokens."""
    before = [None, *words][: len(words)]
    return np.array(
        [-1 if w is None or w == b else w for w, b in zip(words, before, strict=True)],
        dtype=np.int32,
    )


def _labels(task: Task, examples: Sequence[Example], tokens: TokenizedRows) -> Array | None:
    """Return the labels in the form of `TokenizedRows`, or None if they are withheld."""
    labels = [e.label for e in examples]
    if not labels or None in labels:
        return None
    if task.kind in ("class", "score"):
        return np.array(labels, dtype=np.int64 if task.kind == "class" else np.float32)
    if tokens.words_T is not None:
        words = np.split(tokens.words_T, tokens.ends[:-1])
        rows = [
            np.where(w >= 0, np.array(label)[w], IGNORED)
            for w, label in zip(words, labels, strict=True)
        ]
        return np.concatenate(rows).astype(np.int64)
    one_hot = np.zeros((len(labels), len(task.labels)), dtype=np.float32)
    for row, label in zip(one_hot, labels, strict=True):
        row[np.array(label, dtype=np.int64)] = 1.0
    return one_hot


def encode_targets(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    target_length: int,
    end_id: int,
    token_types: bool,
) -> TokenizedRows:
    """Tokenise sources and their targets.

    The row of an example without a target holds only the source. If a source has two texts, the
    longer one is truncated first.

    Args:
        examples: The examples.
        tokenizer: The tokenizer.
        max_length: The maximum number of tokens per row.
        target_length: How many of these tokens are reserved for the target, including `end_id`.
        end_id: The token that ends a target.
        token_types: Whether to add token types, 0 for the source and 1 for the target.

    Raises:
        UsageError: There is no room for a source, or the tokenizer has no padding token.
    """
    room = max_length - target_length
    if room < MIN_SOURCE_TOKENS:
        raise UsageError(
            f"rows of {max_length} tokens with targets of {target_length} tokens leave "
            f"{max(0, room)} tokens for the source; it needs {MIN_SOURCE_TOKENS}",
            "raise data.max_length (at most the model's positions), or lower workload.max_tokens",
        )
    rows: list[Array] = []
    sources: list[int] = []
    truncated = 0
    for begin in range(0, len(examples), EXAMPLES_PER_CALL):
        portion = examples[begin : begin + EXAMPLES_PER_CALL]
        source, target = _tokenize_pairs(portion, tokenizer, room, target_length - 1)
        truncated += sum(map(max, were_cut(source, room), were_cut(target, target_length - 1)))
        pairs = zip(source["input_ids"], target["input_ids"], strict=True)
        for example, (source_ids, target_ids) in zip(portion, pairs, strict=True):
            ids = source_ids if example.label is None else [*source_ids, *target_ids, end_id]
            rows.append(np.asarray(ids, dtype=np.int32))
            sources.append(len(source_ids))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ids_T = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
    at_T = np.arange(len(ids_T)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_target_T = at_T >= np.repeat(np.array(sources, dtype=np.int64), lengths)
    return TokenizedRows(
        ids_T=ids_T,
        types_T=is_target_T.astype(np.int8) if token_types else None,
        ends=np.cumsum(lengths),
        labels=np.where(is_target_T, ids_T, IGNORED).astype(np.int64),
        example=np.arange(len(rows)),
        truncated=truncated,
        pad_id=pad_id(tokenizer),
        kind="text",
        sources=np.array(sources, dtype=np.int64),
    )


def _tokenize_pairs(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    source_length: int,
    target_length: int,
) -> tuple[BatchEncoding, BatchEncoding]:
    """Tokenise sources with special tokens and targets without, and truncate both."""
    options: dict[str, bool] = {
        "return_attention_mask": False,
        "truncation": True,
        "verbose": False,
    }
    columns = map(list, zip(*(e.texts for e in examples), strict=True))
    source = tokenizer(*columns, max_length=source_length, **options)
    texts = [str(e.label or "") for e in examples]
    target = tokenizer(texts, add_special_tokens=False, max_length=target_length, **options)
    return source, target
