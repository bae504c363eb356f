"""Metrics of tasks with a label for each word: whole entities, as seqeval and conlleval count them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from seqeval.metrics.sequence_labeling import get_entities  # type: ignore[import-untyped]

from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.metrics.classification import f1
from kdcli.types import Task

PREFIXES = (
    "B-",
    "I-",
    "E-",
    "S-",
)  # that seqeval expects; of any other tag it would take the first letter for one


def scorer(
    task: Task, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> Scorer:
    """Score by `f1`, `precision`, `recall` of entities and by `accuracy` of words; 0 where undefined. An entity is
    found if type, first and last word agree. As in seqeval without a scheme, `I-` without `B-` begins an entity. A tag
    without prefix is read as `I-`, so that equal tags in a row are one entity. `predictions`, `references`: label
    names, a list for each sentence. Raises ValueError: a sentence has more or fewer predictions than words."""
    counts = np.array(
        [_counts(p, r) for p, r in zip(predictions, references, strict=True)], dtype=np.float64
    )

    def score(indices: Array) -> dict[str, Any]:
        found, predicted, true, right, words = np.bincount(indices, minlength=len(counts)) @ counts
        return {
            "f1": f1(found, predicted, true),
            "precision": found / max(predicted, 1.0),
            "recall": found / max(true, 1.0),
            "accuracy": right / max(words, 1.0),
        }

    return score


def _counts(predicted: Sequence[str], true: Sequence[str]) -> tuple[int, int, int, int, int]:
    """Counts of a sentence: entities found, predicted and true; words labelled right, and all words."""
    if len(predicted) != len(true):
        raise ValueError(f"{len(predicted)} predictions for {len(true)} words")
    ours, theirs = (
        set(get_entities([_prefixed(tag) for tag in tags])) for tags in (predicted, true)
    )
    right = sum(p == t for p, t in zip(predicted, true, strict=True))
    return len(ours & theirs), len(ours), len(theirs), right, len(true)


def _prefixed(tag: str) -> str:
    return tag if tag == "O" or tag.startswith(PREFIXES) else f"I-{tag}"
