"""Metrics of tasks with a label per word: whole entities, as seqeval and conlleval count them."""

from collections.abc import Sequence

import numpy as np

from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.classification import f1
from kdcli.types import Array, Task

EntitySpan = tuple[str, int, int]
"""The type, the index of the first word, and the index after the last word."""

PREFIXES = ("B-", "I-", "E-", "S-")


def scorer(
    task: Task, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> Scorer:
    """Score by `f1`, `precision` and `recall` of entities, and by `accuracy` of words.

    Each metric is 0 where it is undefined. An entity is correct if its type, its first and its last
    word are. `predictions` and `references` hold label names, one list per sentence. Raises
    ValueError if the numbers of predictions and words of a sentence differ.
    """
    pairs = zip(predictions, references, strict=True)
    counts = np.array([_counts(p, r) for p, r in pairs], dtype=np.float64)

    def score(indices: Array) -> dict[str, float]:
        times = np.bincount(indices, minlength=len(counts))
        hits, predicted, true, correct_words, words = times @ counts
        return {
            "f1": float(f1(hits, predicted, true)),
            "precision": hits / max(predicted, 1.0),
            "recall": hits / max(true, 1.0),
            "accuracy": correct_words / max(words, 1.0),
        }

    return score


def entities(tags: Sequence[str]) -> set[EntitySpan]:
    """Return the entities of a sentence, read leniently, as seqeval reads tags without a scheme.

    `B-` and `S-` begin an entity. So do `I-` and `E-` if no entity of their type is open. `E-` and
    `S-` end an entity. A tag without a prefix, such as `NOUN`, is read as `I-NOUN`, so that a run
    of equal tags is one entity.
    """
    spans: set[EntitySpan] = set()
    open_type: str | None = None
    start = 0
    for i, tag in enumerate([*tags, "O"]):
        prefix, name = (tag[0], tag[2:]) if tag.startswith(PREFIXES) else ("I", tag)
        if open_type is not None and (tag == "O" or prefix in "BS" or name != open_type):
            spans.add((open_type, start, i))
            open_type = None
        if tag == "O":
            continue
        if open_type is None:
            open_type, start = name, i
        if prefix in "ES":
            spans.add((open_type, start, i + 1))
            open_type = None
    return spans


def entity_types(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the types of the entities that labels describe, in the order of the labels."""
    return tuple(dict.fromkeys(type_of(tag) for tag in labels if tag != "O"))


def type_of(tag: str) -> str:
    """Return a tag without its prefix: `B-PER` and `I-PER` are `PER`; `O` and `NOUN` stay."""
    return tag[2:] if tag.startswith(PREFIXES) else tag


def _counts(predicted: Sequence[str], true: Sequence[str]) -> tuple[int, int, int, int, int]:
    """Return a sentence's counts.

    They are the correct, predicted and true entities, the correctly labelled words and all words.
    """
    if len(predicted) != len(true):
        raise ValueError(f"{len(predicted)} predictions for {len(true)} words")
    ours, theirs = entities(predicted), entities(true)
    correct_words = sum(p == t for p, t in zip(predicted, true, strict=True))
    return len(ours & theirs), len(ours), len(theirs), correct_words, len(true)
