"""Copies of labelled examples with words replaced: data augmentation of TinyBERT, https://arxiv.org/abs/1909.10351,
algorithm 1.

For each word of a text there are candidates: those of a masked language model with this one word masked, or, where the
word is several tokens, its nearest neighbours among word vectors. In a copy each word is, with a probability, replaced
by one of its candidates at random. Everything else stays as it was, character for character, and so does the label.

* Of a pair a copy changes one text and leaves the other whole: copies take turns, and which text begins is drawn.
* Of a question about a context only the question is changed, so answers stay where they are.
* Of labelled words each stays one word, so labels stay with theirs.
* No word is left out for being frequent; what counts as one, see `kdcli.data.augment.words`.

Candidates take long and belong to a text, not to an example or a copy: they are computed once for each different text
and kept in a file as they come. Copies are drawn from them, anew each time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kdcli.data.augment.candidate_file import CandidateFile, Choices
from kdcli.data.augment.masked_words import Candidates, MaskedWords
from kdcli.data.augment.neighbours import Neighbours
from kdcli.data.augment.words import read, spans_in
from kdcli.types import Example, Task

CHUNK = 512
"""Texts whose candidates are computed, and kept, together: what a kill costs at most."""

SAY_EVERY = 10.0
"""Seconds between words of progress."""

_SOURCE = {
    True: "candidates of a masked language model, of words of several tokens neighbours",
    False: "no masked language model, so neighbours serve for all words",
}


@dataclass(frozen=True)
class Augmented:
    """What came out.

    Attributes:
        examples: those given, in their order, then the copies: all of the first example, all of the second …
        replaced: share of the words that were replaced, among those of the texts that a copy changes.
        notes: how it was done, for the log and the report.
    """

    examples: list[Example]
    replaced: float
    notes: list[str]


def augment(
    task: Task,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    candidates_of: MaskedWords | None,
    neighbours: Neighbours,
    copies: int,
    probability: float,
    candidates: int,
    seed: int,
    file: Path,
    fingerprint: str,
    log: Callable[[str], None],
) -> Augmented:
    """Examples with copies of them; a copy depends on the seed, the example's texts and the copy's number alone.

    Args:
        tokenizer: finds the words of scripts without spaces where there is no masked language model.
        candidates_of: the masked language model; None has neighbours serve for all words.
        copies: of each example.
        probability: with which a word is replaced.
        candidates: of a word, at most.
        file: where candidates are kept; gone on with or used as it is where it is of the same texts, number of
            candidates and fingerprint, else written anew. Only one process may write it.
        fingerprint: of the models, tokenizers and word vectors that candidates come from.
        log: told what takes long, and of a file that was damaged.

    Raises:
        UsageError: a slow tokenizer, see `kdcli.data.augment.words`.
        MachineError: the file cannot be written.
    """
    texts = list(dict.fromkeys(text for e in examples for text in _texts(task, e)))
    key = _hash([fingerprint, candidates, candidates_of is not None, texts])
    kept, said = CandidateFile(file, key, len(texts), log), time.monotonic()
    while kept.done < len(texts):
        portion = texts[kept.done : kept.done + CHUNK]
        kept.add(_choices(portion, tokenizer, candidates_of, neighbours, candidates))
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            log(f"candidates for the words of {kept.done:,} of {len(texts):,} texts")
    place = {text: i for i, text in enumerate(texts)}
    made: list[Example] = []
    words = changed = without = 0
    for example in examples:
        choices = [kept[place[text]] for text in _texts(task, example)]
        without += sum(not options for of_text in choices for _, _, options in of_text)
        for copy, looked_at, taken in _copies(task, example, choices, copies, probability, seed):
            made.append(copy)
            words += looked_at
            changed += taken
    replaced = changed / words if words else 0.0
    notes = [
        f"{len(made):,} copies of {len(examples):,} examples, {copies} of each; {replaced:.1%} of their words replaced",
        f"{_SOURCE[candidates_of is not None]}; {neighbours.note}",
    ]
    if without:
        notes.append(f"{without:,} words have no candidates and stay as they are")
    return Augmented([*examples, *made], replaced, notes)


def _texts(task: Task, example: Example) -> tuple[str, ...]:
    """The texts of an example that copies may change."""
    if task.kind == "tokens":
        return (" ".join(example.texts),)
    return example.texts[:1] if task.kind == "span" else example.texts


def words_of(task: Task, examples: Sequence[Example]) -> set[str]:
    """The different words that copies may change; of scripts without spaces whole runs."""
    texts = {text for e in examples for text in _texts(task, e)}
    return {text[span.begin : span.end] for text in texts for span in spans_in(text)}


def _choices(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    candidates_of: MaskedWords | None,
    neighbours: Neighbours,
    count: int,
) -> list[Choices]:
    if candidates_of is None:
        found = [[Candidates(word.span, None) for word in one.words] for one in read(texts, tokenizer)]
    else:
        found = candidates_of.candidates(texts, count)

    def spelled(text: str, one: Candidates) -> str:
        return text[one.span.begin : one.span.end]

    pairs = list(zip(texts, found, strict=True))
    asked = list(dict.fromkeys(spelled(text, c) for text, of_text in pairs for c in of_text if c.words is None))
    near = dict(zip(asked, neighbours.nearest(asked, count), strict=True))
    # In an order of their own: where two are equally likely, the last bit of a sum must not decide which is drawn.
    return [
        [(c.span.begin, c.span.end, sorted(near[spelled(text, c)] if c.words is None else c.words)) for c in of_text]
        for text, of_text in pairs
    ]


def _copies(
    task: Task, example: Example, choices: Sequence[Choices], copies: int, probability: float, seed: int
) -> Iterator[tuple[Example, int, int]]:
    """The copies of an example, each with the words of the text it changes and how many of them it replaced."""
    turns = [i for i, of_text in enumerate(choices) if any(options for _, _, options in of_text)]
    rng = np.random.Generator(np.random.PCG64(int(_hash([seed, example.texts]), 16)))
    first = int(rng.integers(len(turns))) if turns else 0
    most = max((len(of_text) for of_text in choices), default=0)
    # Row by row: the first copies are the same however many there are.
    drawn_CW2 = rng.random((copies, most, 2))
    for number, drawn_W2 in enumerate(drawn_CW2):
        name = f"{example.id}+{number + 1}"
        if not turns:
            yield replace(example, id=name), sum(map(len, choices)), 0
            continue
        turn = turns[(first + number) % len(turns)]
        edits = [
            (begin, end, options[int(which * len(options))])
            for (begin, end, options), (chance, which) in zip(choices[turn], drawn_W2.tolist(), strict=False)
            if options and chance < probability
        ]
        if task.kind == "tokens":
            texts = _edited_words(example.texts, edits)
        else:
            texts = tuple(_edited(text, edits) if i == turn else text for i, text in enumerate(example.texts))
        yield replace(example, id=name, texts=texts), len(choices[turn]), len(edits)


def _edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """A text with these of its characters replaced; edits are in order and do not overlap."""
    parts, done = [], 0
    for begin, end, word in edits:
        parts += [text[done:begin], word]
        done = end
    return "".join([*parts, text[done:]])


def _edited_words(words: Sequence[str], edits: Sequence[tuple[int, int, str]]) -> tuple[str, ...]:
    """Words under edits of the text that they are with single spaces between."""
    found, begin = [], 0
    for word in words:
        end = begin + len(word)
        found.append(_edited(word, [(b - begin, e - begin, new) for b, e, new in edits if begin <= b and e <= end]))
        begin = end + 1
    return tuple(found)


def _hash(parts: Sequence[Any]) -> str:
    # Half a surrogate pair, which JSON files may hold, is escaped too.
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode("ascii")).hexdigest()


def rows(task: Task, examples: Sequence[Example]) -> Iterator[Mapping[str, Any]]:
    """Examples as rows with the task's columns, as `--task` reads them; classes by number where the task has a name
    and by name in a user's own files, whose numbers are of this reading only."""
    by_number = task.hub is not None

    def named(number: Any) -> Any:
        return number if by_number else task.labels[number]

    for example in examples:
        row: dict[str, Any] = {"id": example.id}
        if task.kind == "tokens":
            row[task.texts[0]] = list(example.texts)
        else:
            row |= zip(task.texts, example.texts, strict=True)
        label: Any = example.label
        if label is not None and task.kind == "span":
            answers = [asdict(answer) for answer in label]
            label = {"text": [a["text"] for a in answers], "answer_start": [a["start"] for a in answers]}
        elif label is not None and task.kind != "score":
            label = named(label) if task.kind == "class" else [named(one) for one in label]
        yield row | {task.label: label}
