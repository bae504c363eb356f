"""Metrics of tasks with any number of C labels per example."""

from collections.abc import Sequence

import numpy as np

from kdcli.metrics.bootstrap import Scorer, WeightedScorer
from kdcli.metrics.classification import f1
from kdcli.types import Array, Task


def scorer(
    task: Task, predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> Scorer:
    """Score by `micro_f1`, `macro_f1` and `exact`.

    `macro_f1` is the mean over all labels. A label that is neither true nor predicted has F1 0, as
    in scikit-learn with `zero_division=0`. `exact` is the share of examples with every label
    correct. `predictions` and `references` hold 0 and 1, [n, C]. Raises ValueError for other values
    or shapes.
    """
    predicted = _indicators(predictions, len(task.labels))
    true = _indicators(references, len(task.labels))
    hits, exact = predicted * true, (predicted == true).all(axis=1)

    def score(indices: Array) -> dict[str, float]:
        times = np.bincount(indices, minlength=len(true)).astype(np.float64)
        hits_C, predicted_C, true_C = times @ hits, times @ predicted, times @ true
        return {
            "micro_f1": float(f1(hits_C.sum(), predicted_C.sum(), true_C.sum())),
            "macro_f1": f1(hits_C, predicted_C, true_C).mean(),
            "exact": times @ exact / len(indices),
        }

    occurrences = predicted + true
    by_label = occurrences / np.maximum(occurrences.sum(axis=0), 1.0)
    weights = {"micro_f1": occurrences.sum(axis=1), "macro_f1": by_label.sum(axis=1)}
    return WeightedScorer(score, weights.get)


def _indicators(rows: Sequence[Sequence[int]], labels: int) -> Array:
    values = np.asarray(rows, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != labels or not np.isin(values, (0.0, 1.0)).all():
        raise ValueError(f"expected 0 and 1 of shape [n, {labels}], got shape {values.shape}")
    return values
