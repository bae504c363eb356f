"""Copies of labelled examples with words replaced: TinyBERT's augmentation
(https://arxiv.org/abs/1909.10351, alg. 1).

A copy replaces each word with a probability by one of its candidates: what a masked language model
predicts with this one word masked or, for a word of several tokens, its nearest neighbours among
word vectors. All other characters and the label stay. Copies of a pair change one text in turn; of
a question about a context only the question changes; of labelled words each stays one word.
Candidates are cached for each different text, copies are drawn anew.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kdcli.data.augment.masked_words import MaskedWords
from kdcli.data.augment.neighbours import Neighbours
from kdcli.data.augment.words import Word, read, words_in
from kdcli.data.sources import LOG_SECONDS, Log
from kdcli.disk import cache_key, disk_errors, write_atomic
from kdcli.types import Example, Task

TEXTS_PER_FILE = 512  # Candidates are computed and cached together: what a kill costs at most.
# For each word of a text: first character, character after the last, candidates.
Choices = list[tuple[int, int, list[str]]]


@dataclass(frozen=True)
class Augmented:
    """The examples given, then all copies of the first, of the second ... `replaced` is the share
    of words replaced in the texts that copies change; `notes` are for the log and the report."""

    examples: list[Example]
    replaced: float
    notes: list[str]


def augment(
    task: Task,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    masked_words: MaskedWords | None,
    neighbours: Neighbours,
    copies: int,
    probability: float,
    candidates: int,
    seed: int,
    folder: Path,
    fingerprint: str,
    log: Log,
) -> Augmented:
    """Examples with copies; a copy depends on the seed, the example's texts and the copy's number
    alone. `tokenizer`: finds the words of scripts without spaces where there is no masked language
    model. `masked_words`: None takes neighbours for all words. `copies`: of each example.
    `probability`: with which a word is replaced. `candidates`: of a word, at most. `folder`: where
    candidates are cached; only one process may write there. `fingerprint`: of the models,
    tokenizers and word vectors that candidates come from. Raises UsageError: a slow tokenizer, see
    `kdcli.data.augment.words`; MachineError: the cache cannot be written."""
    texts = list(dict.fromkeys(text for e in examples for text in _texts(task, e)))
    key = cache_key(fingerprint, candidates, masked_words is not None, TEXTS_PER_FILE, texts)
    choices_of: dict[str, Choices] = {}
    logged = time.monotonic()
    for begin in range(0, len(texts), TEXTS_PER_FILE):
        portion = texts[begin : begin + TEXTS_PER_FILE]
        file = folder / key / f"{begin:09d}.json"
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            cached = json.loads(file.read_text("utf-8")) if file.exists() else None
        if cached is None:
            cached = _candidates(portion, tokenizer, masked_words, neighbours, candidates)
            write_atomic(file, json.dumps(cached))
        choices_of |= zip(portion, cached, strict=True)
        if time.monotonic() - logged > LOG_SECONDS:
            logged = time.monotonic()
            log(f"candidates for the words of {len(choices_of):,} of {len(texts):,} texts")
    made: list[Example] = []
    words = replaced = without = 0
    for example in examples:
        choices = [choices_of[text] for text in _texts(task, example)]
        without += sum(not options for text_choices in choices for _, _, options in text_choices)
        for copy, words_seen, words_replaced in _copies(
            task, example, choices, copies, probability, seed
        ):
            made.append(copy)
            words += words_seen
            replaced += words_replaced
    share = replaced / words if words else 0.0
    source = "candidates of a masked language model, of words of several tokens neighbours"
    if masked_words is None:
        source = "no masked language model, so neighbours serve for all words"
    notes = [
        f"{len(made):,} copies of {len(examples):,} examples, {copies} of each; {share:.1%} of "
        "their words replaced",
        f"{source}; {neighbours.note}",
    ]
    if without:
        notes.append(f"{without:,} words have no candidates and stay as they are")
    return Augmented([*examples, *made], share, notes)


def _texts(task: Task, example: Example) -> tuple[str, ...]:
    """The texts of an example that copies may change."""
    if task.kind == "tokens":
        return (" ".join(example.texts),)
    return example.texts[:1] if task.kind == "span" else example.texts


def words_of(task: Task, examples: Sequence[Example]) -> set[str]:
    """The different words that copies may change; of scripts without spaces whole runs."""
    texts = {text for e in examples for text in _texts(task, e)}
    return {text[word.begin : word.end] for text in texts for word in words_in(text)}


def _candidates(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    masked_words: MaskedWords | None,
    neighbours: Neighbours,
    count: int,
) -> list[Choices]:
    """The candidates of all words: of the masked language model, else neighbours."""
    likely: list[list[tuple[Word, list[str] | None]]]
    if masked_words is None:
        likely = [[(word, None) for word in one.words] for one in read(texts, tokenizer)]
    else:
        likely = masked_words.candidates(texts, count)
    spelled = [
        [(text[w.begin : w.end], w, c) for w, c in words]
        for text, words in zip(texts, likely, strict=True)
    ]
    missing = list(
        dict.fromkeys(spelling for words in spelled for spelling, _, c in words if c is None)
    )
    near = dict(zip(missing, neighbours.nearest(missing, count), strict=True))
    # Sorted: where two are equally likely, the last bit of a sum must not decide which is drawn.
    return [
        [
            (word.begin, word.end, sorted(near[spelling] if c is None else c))
            for spelling, word, c in words
        ]
        for words in spelled
    ]


def _copies(
    task: Task,
    example: Example,
    choices: Sequence[Choices],
    copies: int,
    probability: float,
    seed: int,
) -> Iterator[tuple[Example, int, int]]:
    """The copies of an example, each with the words of the text it changes and how many of them it
    replaced."""
    turns = [i for i, words in enumerate(choices) if any(options for _, _, options in words)] or [0]
    digest = hashlib.sha256(json.dumps([seed, example.texts]).encode("ascii")).hexdigest()
    rng = np.random.Generator(np.random.PCG64(int(digest, 16)))
    first = int(rng.integers(len(turns)))
    # Drawn row by row: the first copies are the same however many there are.
    draws_CW2 = rng.random((copies, max(map(len, choices), default=0), 2))
    for number, draws_W2 in enumerate(draws_CW2.tolist()):
        turn = turns[(first + number) % len(turns)]
        edits = [
            (begin, end, options[int(which * len(options))])
            for (begin, end, options), (chance, which) in zip(choices[turn], draws_W2, strict=False)
            if options and chance < probability
        ]
        if task.kind == "tokens":
            texts = tuple(_edited_words(example.texts, edits))
        else:
            texts = tuple(
                _edited(text, edits) if i == turn else text for i, text in enumerate(example.texts)
            )
        yield (
            replace(example, id=f"{example.id}+{number + 1}", texts=texts),
            len(choices[turn]),
            len(edits),
        )


def _edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """A text with these of its characters replaced; edits are in order and do not overlap."""
    parts, done = [], 0
    for begin, end, word in edits:
        parts += [text[done:begin], word]
        done = end
    return "".join([*parts, text[done:]])


def _edited_words(words: Sequence[str], edits: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    """Words under edits of the text that joins them with single spaces."""
    begin = 0
    for word in words:
        end = begin + len(word)
        yield _edited(
            word, [(b - begin, e - begin, new) for b, e, new in edits if begin <= b and e <= end]
        )
        begin = end + 1


def rows(task: Task, examples: Sequence[Example]) -> Iterator[Mapping[str, Any]]:
    """Examples as rows in the task's columns, as `--task` reads them; classes by number, of own
    files by name."""
    named: Any = task.labels if task.hub is None else range(len(task.labels))
    for example in examples:
        texts = [list(example.texts)] if task.kind == "tokens" else example.texts
        label: Any = example.label
        if label is not None and task.kind == "span":
            label = {"text": [a.text for a in label], "answer_start": [a.start for a in label]}
        elif label is not None and task.kind != "score":
            label = named[label] if task.kind == "class" else [named[one] for one in label]
        yield {"id": example.id, **dict(zip(task.texts, texts, strict=True)), task.label: label}
