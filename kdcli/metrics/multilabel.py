"""Metrics of tasks that give each example any of C labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.metrics.classification import f1
from kdcli.types import Task


def scorer(task: Task, predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> Scorer:
    """Score by `micro_f1`, `macro_f1`, `exact`, from the hits and misses of each label in each example.

    `macro_f1` is the mean over all labels, `exact` the share of examples with every label right. The F1 of a label
    that neither is there nor is predicted is 0, as in scikit-learn with `zero_division=0`.

    Args:
        predictions, references: 0 and 1, [n, C].

    Raises:
        ValueError: not 0 and 1, or not [n, C].
    """
    predicted, true = _indicators(predictions, len(task.labels)), _indicators(references, len(task.labels))
    found, exact = predicted * true, (predicted == true).all(axis=1)

    def score(indices: Array) -> dict[str, float]:
        """Metric → value over the examples of the given numbers, [n] int64, repeated ones counted each time."""
        times = np.bincount(indices, minlength=len(true)).astype(np.float64)
        found_C, predicted_C, true_C = times @ found, times @ predicted, times @ true
        scores = {
            "micro_f1": float(f1(found_C.sum(), predicted_C.sum(), true_C.sum())),
            "macro_f1": float(f1(found_C, predicted_C, true_C).mean()),
            "exact": float(times @ exact / len(indices)),
        }
        return {name: scores[name] for name in task.metrics}

    return score


def _indicators(given: Sequence[Sequence[int]], labels: int) -> Array:
    values = np.asarray(given, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != labels or not np.isin(values, (0.0, 1.0)).all():
        raise ValueError(f"expected 0 and 1 of shape [n, {labels}], got shape {values.shape}")
    return values
