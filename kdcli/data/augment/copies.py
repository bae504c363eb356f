"""Augment labelled examples with copies in which words are replaced, as in TinyBERT.

TinyBERT's augmentation is algorithm 1 of https://arxiv.org/abs/1909.10351. In a copy, each word is
replaced with some probability by one of its candidates. Candidates are the predictions of a masked
language model when only this word is masked. For a word of several tokens, they are the nearest
neighbours among word vectors. All other characters and the label stay the same.

The copies of a pair change its two texts in turn. For a question about a context, only the question
changes. For labelled words, each word stays one word. Candidates are cached for each different
text; copies are drawn again in each run.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kdcli.data.augment.masked_words import MaskedWords
from kdcli.data.augment.neighbours import Neighbours
from kdcli.data.augment.words import Word, tokenize_words, words_in
from kdcli.data.sources import LOG_SECONDS
from kdcli.disk import cache_key, disk_errors, use_entry, write_atomic
from kdcli.messages import log
from kdcli.types import IGNORED, Example, Task

# Texts whose candidates are computed and cached together. A killed run loses at most this many.
TEXTS_PER_FILE = 512
# For each word of a text: its first character, the character after its last, and its candidates.
Choices = list[tuple[int, int, list[str]]]


@dataclass(frozen=True)
class Augmented:
    """Examples with their copies.

    Attributes:
        examples: The original examples, then all copies of the first, of the second, and so on.
        notes: Messages for the log and the report.
    """

    examples: list[Example]
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
) -> Augmented:
    """Augment examples with copies.

    A copy depends only on the seed, the example's texts and the number of the copy.

    Args:
        task: The task of the examples.
        examples: The examples.
        tokenizer: Finds the words of scripts without spaces if there is no masked language model.
        masked_words: The masked language model. If None, all candidates are neighbours.
        neighbours: The word vectors.
        copies: The number of copies of each example.
        probability: The probability that a word is replaced.
        candidates: The maximum number of candidates per word.
        seed: The seed of the copies.
        folder: The cache of candidates. Only one process may write there.
        fingerprint: Identifies the models, tokenizers and word vectors that candidates come from.

    Raises:
        UsageError: The tokenizer is slow, see `kdcli.data.augment.words`.
        MachineError: The cache cannot be written.
    """
    texts = list(dict.fromkeys(text for e in examples for text in _texts(task, e)))
    key = cache_key(fingerprint, candidates, masked_words is not None, TEXTS_PER_FILE, texts)

    def choose(portion: Sequence[str]) -> list[Choices]:
        return _candidates(portion, tokenizer, masked_words, neighbours, candidates)

    use_entry(folder / key, f"{len(texts):,} texts")
    choices_of = _cached_choices(texts, choose, folder / key)
    all_copies: list[Example] = []
    words = replaced = without = 0
    for example in examples:
        choices = [choices_of[text] for text in _texts(task, example)]
        without += sum(not options for text_choices in choices for _, _, options in text_choices)
        for copy, copy_words, copy_replaced in _copies(
            task, example, choices, copies, probability, seed
        ):
            all_copies.append(copy)
            words += copy_words
            replaced += copy_replaced
    share = replaced / words if words else 0.0
    source = "words of several tokens take neighbours, others a masked language model's predictions"
    if masked_words is None:
        source = "no masked language model, so all replacement words are nearest neighbours"
    notes = [
        f"{len(all_copies):,} copies of {len(examples):,} examples, {copies} of each; {share:.1%} "
        "of their words replaced",
        f"{source}; {neighbours.note}",
    ]
    if without:
        notes.append(f"{without:,} words have no candidates and are never replaced")
    return Augmented([*examples, *all_copies], notes)


def _cached_choices(
    texts: Sequence[str],
    choose: Callable[[Sequence[str]], list[Choices]],
    folder: Path,
) -> dict[str, Choices]:
    """Return the choices of each text. `choose` computes the ones that the cache lacks."""
    choices_of: dict[str, Choices] = {}
    logged = time.monotonic()
    for begin in range(0, len(texts), TEXTS_PER_FILE):
        portion = texts[begin : begin + TEXTS_PER_FILE]
        file = folder / f"{begin:09d}.json"
        with disk_errors(file):
            cached = _read_choices(file, len(portion)) if file.exists() else None
        if cached is None:
            cached = choose(portion)
            write_atomic(file, json.dumps(cached))
        choices_of |= zip(portion, cached, strict=True)
        if time.monotonic() - logged > LOG_SECONDS:
            logged = time.monotonic()
            log(f"candidates for the words of {len(choices_of):,} of {len(texts):,} texts")
    return choices_of


def _read_choices(file: Path, count: int) -> list[Choices] | None:
    """Read the choices of a number of texts. Returns None if the file is damaged."""
    try:
        choices: list[Choices] = json.loads(file.read_text("utf-8"))
    except ValueError:
        return None
    return choices if isinstance(choices, list) and len(choices) == count else None


def _texts(task: Task, example: Example) -> tuple[str, ...]:
    """Return the texts of an example that copies may change."""
    if task.kind == "tokens":
        return (" ".join(example.texts),)
    return example.texts[:1] if task.kind == "span" else example.texts


def words_of(task: Task, examples: Sequence[Example]) -> set[str]:
    """Return the different words that copies may change.

    In scripts without spaces, a whole run of letters counts as a word.
    """
    texts = {text for e in examples for text in _texts(task, e)}
    return {text[word.begin : word.end] for text in texts for word in words_in(text)}


def _candidates(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    masked_words: MaskedWords | None,
    neighbours: Neighbours,
    count: int,
) -> list[Choices]:
    """Find the candidates of all words: predictions if there are any, otherwise neighbours."""
    predicted: list[list[tuple[Word, list[str] | None]]]
    if masked_words is None:
        predicted = [[(w, None) for w in text.words] for text in tokenize_words(texts, tokenizer)]
    else:
        predicted = masked_words.candidates(texts, count)
    spelled = [
        [(text[w.begin : w.end], w, c) for w, c in words]
        for text, words in zip(texts, predicted, strict=True)
    ]
    missing = list(
        dict.fromkeys(spelling for words in spelled for spelling, _, c in words if c is None)
    )
    nearest = dict(zip(missing, neighbours.nearest(missing, count), strict=True))
    # Sort the candidates, so that rounding cannot change the order of two equally likely ones.
    return [
        [
            (word.begin, word.end, sorted(nearest[spelling] if c is None else c))
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
    """Yield each copy, the number of words in the changed text, and how many were replaced."""
    turns = [i for i, words in enumerate(choices) if any(options for _, _, options in words)] or [0]
    digest = hashlib.sha256(json.dumps([seed, example.texts]).encode("ascii")).hexdigest()
    rng = np.random.Generator(np.random.PCG64(int(digest, 16)))
    first = int(rng.integers(len(turns)))
    # One row per copy, so that the first copies do not depend on the number of copies.
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
    """Replace parts of a text. The edits are in order and do not overlap."""
    parts, done = [], 0
    for begin, end, word in edits:
        parts += [text[done:begin], word]
        done = end
    return "".join([*parts, text[done:]])


def _edited_words(words: Sequence[str], edits: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    """Apply edits of the text in which the words are joined by single spaces."""
    begin = 0
    for word in words:
        end = begin + len(word)
        yield _edited(
            word, [(b - begin, e - begin, new) for b, e, new in edits if begin <= b and e <= end]
        )
        begin = end + 1


def rows(task: Task, examples: Sequence[Example]) -> Iterator[Mapping[str, object]]:
    """Yield examples as rows with the task's columns, which `--task` can read.

    Classes are numbers, or names if the task comes from the user's own files.
    """
    classes: Sequence[object] = task.labels if task.hub is None else range(len(task.labels))
    for example in examples:
        texts = [list(example.texts)] if task.kind == "tokens" else example.texts
        label: Any = example.label
        if label is not None and task.kind == "span":
            label = {"text": [a.text for a in label], "answer_start": [a.start for a in label]}
        elif label is not None and task.kind != "score":
            names = dict(enumerate(classes)) | {IGNORED: IGNORED}
            label = names[label] if task.kind == "class" else [names[n] for n in label]
        yield {"id": example.id, **dict(zip(task.texts, texts, strict=True)), task.label: label}
