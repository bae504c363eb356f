"""Labelled examples as rows of token ids, held ragged and padded only batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.types import IGNORED, Batch, Example, Kind, Task

AT_ONCE = 4096
"""Examples tokenised at once, which bounds the memory the tokenizer's own objects take."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Encoded:
    """Rows of token ids with their labels; an `Examples` of `kdcli.types`.

    Attributes:
        ids_T: the ids of all rows, one after another, int32.
        types_T: their token types, int8; None when the model has none.
        ends: where each row ends in `ids_T`, [rows] int64.
        labels: a row each, as in `kdcli.types.Kind`; of `tokens` one for each of `ids_T`; None when withheld.
        example: of which example each row is, [rows] int64; several rows may be windows of one.
        truncated: examples of which something was cut off.
        pad_id: what a batch is filled up with.
        kind: of the task.
    """

    ids_T: Array
    types_T: Array | None
    ends: Array
    labels: Array | None
    example: Array
    truncated: int
    pad_id: int
    kind: Kind

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Array:
        """Tokens of each row, [rows] int64."""
        return np.diff(self.ends, prepend=0)

    def batch(self, indices: Array) -> Batch:
        """Collate rows, padded on the right to the longest of them; token lists that are not padded stay exact."""
        lengths = self.lengths[indices]
        real_BL = np.arange(lengths.max())[None, :] < lengths[:, None]
        # Where a row is over, any place in bounds will do: it is overwritten.
        at_BL = np.where(real_BL, (self.ends[indices] - lengths)[:, None] + np.arange(lengths.max()), 0)

        def padded(values_T: Array, filler: int) -> torch.Tensor:
            return torch.from_numpy(np.where(real_BL, values_T[at_BL], filler).astype(np.int64))

        batch = {"input_ids": padded(self.ids_T, self.pad_id), "attention_mask": torch.from_numpy(real_BL.astype("i8"))}
        if self.types_T is not None:
            batch["token_type_ids"] = padded(self.types_T, 0)
        if self.labels is not None:
            of_tokens = self.kind == "tokens"
            batch["labels"] = padded(self.labels, IGNORED) if of_tokens else torch.from_numpy(self.labels[indices])
        return batch

    def by_length(self) -> Encoded:
        """The same rows, shortest first: what is judged need not be padded much."""
        return self.take(np.argsort(self.lengths, kind="stable"))

    def take(self, rows: Array) -> Encoded:
        """Some of the rows, in the order given."""
        lengths = self.lengths[rows]
        places = [np.arange(end - length, end) for end, length in zip(self.ends[rows], lengths, strict=True)]
        at = np.concatenate(places) if places else np.empty(0, dtype=np.int64)
        labels = self.labels
        if labels is not None:
            labels = labels[at] if self.kind == "tokens" else labels[rows]
        return replace(
            self,
            ids_T=self.ids_T[at],
            types_T=None if self.types_T is None else self.types_T[at],
            ends=np.cumsum(lengths),
            labels=labels,
            example=self.example[rows],
        )


def encode(
    task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, *, max_length: int, token_types: bool
) -> Encoded:
    """Tokenise the examples of any task but a `span` one, for which see `kdcli.data.spans`.

    Args:
        max_length: tokens of a row at most, special ones included; a pair loses from its longer text.
        token_types: whether the model tells the two texts of a pair apart by token types.

    Raises:
        UsageError: the tokenizer has no padding token.
    """
    ids: list[Array] = []
    types: list[Array] = []
    labels: list[Array] = []
    truncated = 0
    for begin in range(0, len(examples), AT_ONCE):
        portion = examples[begin : begin + AT_ONCE]
        words = task.kind == "tokens"
        columns = (
            [[e.texts for e in portion]] if words else [list(c) for c in zip(*(e.texts for e in portion), strict=True)]
        )
        found = tokenizer(
            *columns,
            is_split_into_words=words,
            truncation=True,
            max_length=max_length,
            return_token_type_ids=token_types,
            return_attention_mask=False,
            verbose=False,
        )
        ids += [np.asarray(row, dtype=np.int32) for row in found["input_ids"]]
        if token_types:
            types += [np.asarray(row, dtype=np.int8) for row in found["token_type_ids"]]
        truncated += _truncated(found, max_length)
        if words:
            labels += _of_pieces(portion, [found.word_ids(i) for i in range(len(portion))])
    return Encoded(
        ids_T=np.concatenate(ids) if ids else np.empty(0, dtype=np.int32),
        types_T=np.concatenate(types) if types else None,
        ends=np.cumsum([len(row) for row in ids]),
        labels=np.concatenate(labels) if labels else _labels(task, examples),
        example=np.arange(len(ids)),
        truncated=truncated,
        pad_id=pad_id(tokenizer),
        kind=task.kind,
    )


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the padding token.

    Raises:
        UsageError: there is none.
    """
    if tokenizer.pad_token_id is None:
        raise UsageError("the tokenizer has no padding token", "set pad_token in its tokenizer_config.json")
    return int(tokenizer.pad_token_id)


def _truncated(found: Any, max_length: int) -> int:
    if found.encodings is None:
        # Python tokenizers do not tell what they cut; a full row may have been whole.
        return sum(len(row) >= max_length for row in found["input_ids"])
    return sum(bool(encoding.overflowing) for encoding in found.encodings)


def _labels(task: Task, examples: Sequence[Example]) -> Array | None:
    """The labels of `class`, `multi` or `score` examples; None when they are withheld."""
    if not examples or any(e.label is None for e in examples):
        return None
    if task.kind == "class":
        return np.array([e.label for e in examples], dtype=np.int64)
    if task.kind == "score":
        return np.array([e.label for e in examples], dtype=np.float32)
    chosen = np.zeros((len(examples), len(task.labels)), dtype=np.float32)
    for row, example in zip(chosen, examples, strict=True):
        row[np.array(example.label, dtype=np.int64)] = 1.0
    return chosen


def _of_pieces(examples: Sequence[Example], words: Sequence[Sequence[int | None]]) -> Iterator[Array]:
    """The label of each word at its first piece, `IGNORED` at the others and at special tokens."""
    for example, of_row in zip(examples, words, strict=True):
        before = [None, *of_row[:-1]]
        label: Any = example.label
        yield np.array(
            [
                IGNORED if label is None or w is None or w == b else label[w]
                for w, b in zip(of_row, before, strict=True)
            ],
            dtype=np.int64,
        )
