"""Extractive question answering: tokenise questions and contexts, and decode answers from logits.

As in the reference scripts of SQuAD, a context that does not fit is cut into overlapping windows.
The answer is the best span of all windows.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, starmap
from typing import NamedTuple, Self, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from kdcli.data.labelled.features import (
    EXAMPLES_PER_CALL,
    TokenizedRows,
    cover_letters,
    pad_id,
)
from kdcli.errors import UsageError
from kdcli.types import Answer, Array, Example

MAX_LOST = 0.01
"""Maximum share of the answers that the offsets of a tokenizer cut."""


@dataclass(frozen=True, kw_only=True)
class Windows(TokenizedRows):
    """Windows `[CLS] question [SEP] context [SEP]` with the positions of tokens in the contexts.

    `labels`, [rows, 2] int64, are the first and last token of the first gold answer, or both `cls`
    if a window does not contain the whole answer. `truncated` counts the examples that have several
    windows.

    Attributes:
        cls: The position of the classification token, [rows] int64. Its logits mean "no answer".
        char_begin_T, char_end_T: The characters of the context that each token stands for, int32.
            They may include the space before the token. -1 outside the context.
    """

    cls: Array
    char_begin_T: Array
    char_end_T: Array

    def take(self, rows: Array) -> Self:
        """Select windows by index, in the given order."""
        at_T = self.places(rows)
        return replace(
            super().take(rows),
            cls=self.cls[rows],
            char_begin_T=self.char_begin_T[at_T],
            char_end_T=self.char_end_T[at_T],
        )


@dataclass(frozen=True)
class Decoded:
    """A model's answer to one example.

    Attributes:
        id: The id of the example.
        text: The best span of the context, without surrounding white space. Empty without a span.
        no_answer: The logit of "no answer" minus the logit of the best span. Infinite if there is
            no span.
        score: The logit of the best span: the sum for its first and last token. -inf if there is no
            span.
    """

    id: str
    text: str
    no_answer: float
    score: float


def misplaced(example: Example) -> str | None:
    """Describe the first gold answer that is not at its `answer_start`, or return None."""
    context = example.texts[1]
    for answer in cast(tuple[Answer, ...], example.label or ()):
        if not answer.text.strip():
            return (
                f"{example.where}: an answer is empty; give an empty list if the question has no "
                "answer"
            )
        if answer.start < 0 or not context.startswith(answer.text, answer.start):
            return (
                f"{example.where}: answer '{answer.text}' is not at character {answer.start} of "
                "its context"
            )
    return None


def check_answers(examples: Sequence[Example]) -> list[str]:
    """Return a line for each example with a gold answer that is not at its `answer_start`."""
    return [line for line in map(misplaced, examples) if line is not None]


def windows(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    stride: int,
    token_types: bool,
) -> Windows:
    """Tokenise the examples of a `span` task.

    Questions are stripped of leading white space and truncated to half of `max_length`.

    Args:
        examples: The examples.
        tokenizer: The tokenizer.
        max_length: The maximum number of tokens per window, including special tokens.
        stride: The number of tokens of the context that consecutive windows share.
        token_types: Whether the model distinguishes question and context by token types.

    Raises:
        UsageError: The tokenizer does not tell where its tokens come from or has no padding token,
            or next to the longest question a window would hold no more than `stride` tokens of the
            context, or the tokenizer loses letters of the answers.
    """
    _check_windows(tokenizer, max_length, stride)
    rows = list(_windows(examples, tokenizer, max_length, stride, token_types))
    _check_decoded(examples, rows, tokenizer)
    chars_T2 = np.concatenate([np.empty((0, 2), dtype=np.int32), *(row.chars for row in rows)])
    types = [np.empty(0, dtype=np.int8), *(row.types for row in rows)]
    example = [row.example for row in rows]
    labels = [row.label for row in rows]
    withheld = any(e.label is None for e in examples)
    return Windows(
        ids_T=np.concatenate([np.empty(0, dtype=np.int32), *(row.ids for row in rows)]),
        types_T=np.concatenate(types) if token_types else None,
        ends=np.cumsum([len(row.ids) for row in rows], dtype=np.int64),
        labels=None if withheld else np.array(labels, dtype=np.int64).reshape(-1, 2),
        example=np.array(example, dtype=np.int64),
        truncated=sum(n > 1 for n in Counter(example).values()),
        pad_id=pad_id(tokenizer),
        kind="span",
        cls=np.array([row.cls for row in rows], dtype=np.int64),
        char_begin_T=chars_T2[:, 0].copy(),
        char_end_T=chars_T2[:, 1].copy(),
    )


def decode_answers(
    windows: Windows,
    logits: Sequence[Array],
    examples: Sequence[Example],
    *,
    best: int = 20,
    max_answer_tokens: int = 30,
) -> list[Decoded]:
    """Decode the answer to each example.

    A span begins at one of the `best` first tokens of a window, ends at one of its `best` last
    tokens, and lies in the context. An example's score is the highest sum of a span's two logits in
    any of its windows. For "no answer", the lowest sum of any window counts.

    Args:
        windows: The windows of all examples.
        logits: For each window, the logits of the first and the last token, [L, 2]. Padding at the
            end is ignored.
        examples: The examples.
        best: The number of candidates for the first and for the last token.
        max_answer_tokens: The maximum number of tokens of an answer.
    """
    score = np.full(len(examples), -np.inf)
    null = np.full(len(examples), np.inf)
    chars = np.zeros((len(examples), 2), dtype=np.int64)
    for example, stop, length, cls, logits_L2 in zip(
        windows.example, windows.ends, windows.lengths, windows.cls, logits, strict=True
    ):
        begin_L = windows.char_begin_T[stop - length : stop]
        end_L = windows.char_end_T[stop - length : stop]
        starts_L, ends_L = logits_L2[:length].T.astype(np.float64)
        null[example] = min(null[example], starts_L[cls] + ends_L[cls])
        first, last = (
            np.argsort(-values_L, kind="stable")[:best] for values_L in (starts_L, ends_L)
        )
        first, last = first[begin_L[first] >= 0], last[begin_L[last] >= 0]
        tokens = last[None, :] - first[:, None] + 1
        allowed = (tokens >= 1) & (tokens <= max_answer_tokens)
        sums = np.where(allowed, starts_L[first][:, None] + ends_L[last], -np.inf)
        if sums.size and sums.max() > score[example]:
            row, column = np.unravel_index(sums.argmax(), sums.shape)
            score[example] = sums[row, column]
            chars[example] = begin_L[first[row]], end_L[last[column]]
    return [
        Decoded(e.id, _text(e.texts[1], *span), margin, best_sum)
        for e, span, margin, best_sum in zip(
            examples, chars, (null - score).tolist(), score.tolist(), strict=True
        )
    ]


def _check_windows(tokenizer: PreTrainedTokenizerBase, max_length: int, stride: int) -> None:
    """Raise a UsageError if the tokenizer is slow, or windows cannot overlap by `stride` tokens."""
    if not tokenizer.is_fast:
        message = (
            f"{type(tokenizer).__name__} does not tell which characters a token stands for, which "
            "answers need"
        )
        raise UsageError(message, "use a model that comes with a fast tokenizer (tokenizer.json)")
    room = max_length - max_length // 2 - tokenizer.num_special_tokens_to_add(pair=True)
    if not 0 <= stride < room:
        possible = (
            f"0 to {room - 1} are possible"
            if room > 0
            else "half of it is for the question, and nothing is left for the context"
        )
        hint = "lower stride or raise max_length" if stride >= 0 else "give a stride of 0 or more"
        raise UsageError(
            f"windows of {max_length} tokens cannot overlap by {stride}: {possible}", hint
        )


def _check_decoded(
    examples: Sequence[Example], rows: Sequence[_Window], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Decode the gold answers from their tokens.

    Raises:
        UsageError: More than a few answers lack letters, so no model with this tokenizer can score
            well.
    """
    count, lost = 0, []
    for row in rows:
        example, (first, last) = examples[row.example], row.label
        if first == last == row.cls:
            continue
        count += 1
        answer = cast(tuple[Answer, ...], example.label)[0].text
        decoded = _text(example.texts[1], row.chars[first, 0], row.chars[last, 1])
        if _letters(answer) not in _letters(decoded):
            lost.append(f"{example.where}: '{answer}' is decoded as '{decoded}'")
    if len(lost) > MAX_LOST * count:
        raise UsageError(
            f"the tokenizer ({type(tokenizer).__name__}) loses letters of {len(lost):,} of "
            f"{count:,} answers: {lost[0]}",
            "use a model with another tokenizer; the offsets of this one do not cover its tokens",
        )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _text(context: str, begin: int, end: int) -> str:
    """Return the text of a span of characters, without surrounding white space."""
    # If a tokenizer strips accents, its tokens exclude a combining mark at their end.
    while end > begin and end < len(context) and unicodedata.category(context[end]).startswith("M"):
        end += 1
    return context[begin:end].strip()


class _Window(NamedTuple):
    """A window of an example.

    Attributes:
        ids: Token ids, [L] int32.
        types: Token types, [L] int8; empty if the model has none.
        chars: The first and the last character of each token in the context, [L, 2].
        example: The index of the example.
        cls: The position of [CLS].
        label: The first and the last token of the answer.
    """

    ids: Array
    types: Array
    chars: Array
    example: int
    cls: int
    label: tuple[int, int]


def _windows(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
    token_types: bool,
) -> Iterator[_Window]:
    """Yield the windows of all examples."""
    cls_id = tokenizer.cls_token_id
    for begin in range(0, len(examples), EXAMPLES_PER_CALL):
        portion = examples[begin : begin + EXAMPLES_PER_CALL]
        encoded = tokenizer(
            _questions([e.texts[0].lstrip() for e in portion], tokenizer, max_length // 2),
            [e.texts[1] for e in portion],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=token_types,
            return_attention_mask=False,
            verbose=False,
        )
        samples = encoded["overflow_to_sample_mapping"]
        for number, group in groupby(range(len(samples)), key=samples.__getitem__):
            rows = list(group)
            ids = [np.asarray(encoded["input_ids"][row], dtype=np.int32) for row in rows]
            types = [
                np.asarray(encoded["token_type_ids"][row] if token_types else (), dtype=np.int8)
                for row in rows
            ]
            texts = [encoded.sequence_ids(row) for row in rows]
            context = portion[number].texts[1]
            chars = cover_letters(
                context,
                [
                    _characters(encoded["offset_mapping"][row], of_row)
                    for row, of_row in zip(rows, texts, strict=True)
                ],
            )
            # The position is 0 if the tokenizer adds no classification token.
            special = [[i for i, text in enumerate(of_row) if text is None] for of_row in texts]
            cls = [
                next((i for i in positions if row[i] == cls_id), 0)
                for row, positions in zip(ids, special, strict=True)
            ]
            labels = _labels(portion[number], chars, cls)
            example = [begin + number] * len(rows)
            columns = zip(ids, types, chars, example, cls, labels, strict=True)
            yield from starmap(_Window, columns)


def _questions(questions: list[str], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[str]:
    """Truncate questions to `limit` tokens."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(questions, return_offsets_mapping=True, **options)
    for i, offsets in enumerate(encoded["offset_mapping"]):
        # A part of a word may need more tokens than it had within the whole word, so try again with
        # fewer. The same holds for a character of several tokens.
        kept = limit
        while len(offsets) > limit and len(tokenizer(questions[i], **options)["input_ids"]) > limit:
            questions[i] = questions[i][: offsets[kept - 1][1]] if kept else ""
            kept -= 1
    return questions


def _characters(offsets: Sequence[tuple[int, int]], texts: Sequence[int | None]) -> Array:
    """Return the characters of a window's tokens, [L, 2] int32; -1 outside the context (text 1)."""
    chars_L2 = np.full((len(offsets), 2), -1, dtype=np.int32)
    if 1 in texts:
        # The tokens of the context are consecutive.
        begin = texts.index(1)
        end = begin + texts.count(1)
        chars_L2[begin:end] = np.fromiter(
            chain.from_iterable(offsets[begin:end]), dtype=np.int32
        ).reshape(-1, 2)
    return chars_L2


def _labels(
    example: Example, windows: Sequence[Array], cls: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the first and last token of the first gold answer in each window of an example."""
    answers = cast(tuple[Answer, ...], example.label or ())
    if not answers or misplaced(example):
        return [(position, position) for position in cls]
    text, begin = answers[0].text, answers[0].start
    # Strip the answer: a token that holds only surrounding space does not belong to it.
    end = begin + len(text.rstrip())
    begin += len(text) - len(text.lstrip())
    inside = [
        np.flatnonzero((chars_L2[:, 1] > begin) & (chars_L2[:, 0] < end)) for chars_L2 in windows
    ]
    parts = [
        (w[at[0], 0], w[at[-1], 1]) if len(at) else None
        for w, at in zip(windows, inside, strict=True)
    ]
    nonempty = [part for part in parts if part is not None]
    # A tokenizer may drop characters, so the whole answer is what the tokens of all windows cover.
    whole = (min(p[0] for p in nonempty), max(p[1] for p in nonempty)) if nonempty else None
    return [
        (int(at[0]), int(at[-1])) if part is not None and part == whole else (position, position)
        for at, part, position in zip(inside, parts, cls, strict=True)
    ]
