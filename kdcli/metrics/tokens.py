"""Metrics of tasks that label the words of a sentence: whole entities, as seqeval and conlleval count them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from seqeval.metrics.sequence_labeling import get_entities  # type: ignore[import-untyped]

from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.metrics.classification import f1
from kdcli.types import Task

PREFIXES = ("B-", "I-", "E-", "S-")
"""By these seqeval knows the tags of IOB2 and its kin; it reads the first letter of any other tag as one of them."""


def scorer(task: Task, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Scorer:
    """Score by `f1`, `precision`, `recall` of entities and by `accuracy` of words, from their numbers per sentence.

    An entity counts as found when type, first and last word agree. Entities are read leniently, as seqeval does
    without a scheme: `I-` without `B-` begins one. A tag without prefix is read as if it had `I-`, so that words in a
    row with the same tag are one entity. What has a denominator of 0 is 0.

    Args:
        predictions, references: names of labels, a list a sentence.

    Raises:
        ValueError: a sentence has more or fewer predictions than words.
    """
    counts = np.array([_counts(p, r) for p, r in zip(predictions, references, strict=True)], dtype=np.float64)

    def score(indices: Array) -> dict[str, float]:
        """Metric → value over the examples of the given numbers, [n] int64, repeated ones counted each time."""
        found, predicted, true, right, words = np.bincount(indices, minlength=len(counts)) @ counts
        scores = {
            "f1": float(f1(found, predicted, true)),
            "precision": float(found / max(predicted, 1.0)),
            "recall": float(found / max(true, 1.0)),
            "accuracy": float(right / max(words, 1.0)),
        }
        return {name: scores[name] for name in task.metrics}

    return score


def _counts(predicted: Sequence[str], true: Sequence[str]) -> tuple[int, int, int, int, int]:
    """Of a sentence: entities found, predicted and true; words labelled right and all words."""
    if len(predicted) != len(true):
        raise ValueError(f"{len(predicted)} predictions for {len(true)} words")
    of_prediction, of_truth = (set(get_entities([_prefixed(tag) for tag in tags])) for tags in (predicted, true))
    right = sum(p == t for p, t in zip(predicted, true, strict=True))
    return len(of_prediction & of_truth), len(of_prediction), len(of_truth), right, len(true)


def _prefixed(tag: str) -> str:
    return tag if tag == "O" or tag.startswith(PREFIXES) else f"I-{tag}"
