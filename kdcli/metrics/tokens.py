"""Metrics of tasks with a label per word: whole entities, as seqeval and conlleval count them."""

from collections.abc import Sequence

import numpy as np

from kdcli.data.labelled.label_values import BEGINS, ENDS, OUTSIDE, tag_of
from kdcli.metrics.bootstrap import Scorer, WeightedScorer
from kdcli.metrics.classification import f1
from kdcli.types import Array, Task

EntitySpan = tuple[str, int, int]
"""The type, the index of the first word, and the index after the last word."""


def scorer(
    task: Task, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> Scorer:
    """Score by `f1`, `precision` and `recall` of entities, and by `accuracy` of words.

    Each metric is 0 where it is undefined. An entity is correct if its type, its first and its last
    word are. `predictions` and `references` hold label names, one list per sentence. Raises
    ValueError if the numbers of predictions and words of a sentence differ.
    """
    pairs = zip(predictions, references, strict=True)
    counts = np.array([_counts(p, r, task.labels) for p, r in pairs], dtype=np.float64)

    def score(indices: Array) -> dict[str, float]:
        times = np.bincount(indices, minlength=len(counts))
        hits, predicted, true, correct_words, words = times @ counts
        return {
            "f1": float(f1(hits, predicted, true)),
            "precision": hits / max(predicted, 1.0),
            "recall": hits / max(true, 1.0),
            "accuracy": correct_words / max(words, 1.0),
        }

    _, predicted_N, true_N, _, words_N = counts.T
    weights = {
        "f1": predicted_N + true_N,
        "precision": predicted_N,
        "recall": true_N,
        "accuracy": words_N,
    }
    return WeightedScorer(score, weights.get)


def entities(tags: Sequence[str], labels: tuple[str, ...] | None = None) -> set[EntitySpan]:
    """Return the entities of a sentence, read leniently, as seqeval reads tags without a scheme.

    `B-` and the prefixes of one word begin an entity. So does any other tag if no entity of its
    type is open. `E-`, `L-` and the prefixes of one word end an entity. A tag without a prefix,
    such as `NOUN`, is read as `I-NOUN`, so that a run of equal tags is one entity.

    Args:
        tags: The label of each word.
        labels: All labels of the task; the ones of the sentence if it is None.
    """
    known = tuple(tags) if labels is None else labels
    spans: set[EntitySpan] = set()
    open_type: str | None = None
    start = 0
    for i, label in enumerate([*tags, OUTSIDE]):
        tag = None if label == OUTSIDE else tag_of(label, known)
        if open_type is not None and (tag is None or tag.prefix in BEGINS or tag.type != open_type):
            spans.add((open_type, start, i))
            open_type = None
        if tag is None:
            continue
        if open_type is None:
            open_type, start = tag.type, i
        if tag.prefix in ENDS:
            spans.add((open_type, start, i + 1))
            open_type = None
    return spans


def entity_types(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the types of the entities that labels describe, in the order of the labels."""
    known = tuple(labels)
    return tuple(dict.fromkeys(type_of(label, known) for label in labels if label != OUTSIDE))


def type_of(label: str, labels: tuple[str, ...]) -> str:
    """Return a label without its prefix: `B-PER` and `I-PER` are `PER`; `O` and `NOUN` stay."""
    return OUTSIDE if label == OUTSIDE else tag_of(label, labels).type


def _counts(
    predicted: Sequence[str], true: Sequence[str], labels: tuple[str, ...]
) -> tuple[int, int, int, int, int]:
    """Return a sentence's counts.

    They are the correct, predicted and true entities, the correctly labelled words and all words.
    """
    if len(predicted) != len(true):
        raise ValueError(f"{len(predicted)} predictions for {len(true)} words")
    ours, theirs = (entities(tags, labels) for tags in (predicted, true))
    correct_words = sum(p == t for p, t in zip(predicted, true, strict=True))
    return len(ours & theirs), len(ours), len(theirs), correct_words, len(true)
