"""Correlations, and the metrics of tasks with a number per example."""

from collections.abc import Sequence

import numpy as np

from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.finite import check_finite
from kdcli.types import Array, Task

CONSTANT = 1e-13
"""Values whose deviation is smaller than this, relative to their mean, count as constant."""


def scorer(task: Task, predictions: Sequence[float], references: Sequence[float]) -> Scorer:
    """Score by `pearson`, `spearman` and `mse`. A correlation with a constant is 0.

    `predictions` and `references` have shape [n]. Raises UsageError if a prediction is not finite.
    """
    predicted = np.asarray(predictions, dtype=np.float64)
    true = np.asarray(references, dtype=np.float64)
    check_finite(predicted, f"predictions of {task.title}")

    def score(indices: Array) -> dict[str, float]:
        p, t = predicted[indices], true[indices]
        return {
            "pearson": pearson(p, t),
            "spearman": spearman(p, t),
            "mse": float(np.mean((t - p) ** 2)),
        }

    return score


def pearson(x_N: Array, y_N: Array) -> float:
    """Return the correlation of two sequences of numbers; 0 if one of them is constant or empty."""
    if _is_constant(x_N) or _is_constant(y_N):
        return 0.0
    # The squares of large numbers would overflow.
    scaled = [values_N / np.abs(values_N).max() for values_N in (x_N, y_N)]
    centred = [values_N - values_N.mean() for values_N in scaled]
    unit = [values_N / np.linalg.norm(values_N) for values_N in centred]
    return float(np.clip(unit[0] @ unit[1], -1.0, 1.0))


def spearman(x_N: Array, y_N: Array) -> float:
    """Return the correlation of the ranks of two sequences; 0 if one of them is constant or empty.

    Equal values share the mean of their ranks.
    """
    if _is_constant(x_N) or _is_constant(y_N):
        return 0.0
    # SciPy takes a second to import. Ranks from 0 have smaller sums.
    from scipy.stats import rankdata

    return pearson(rankdata(x_N) - 1, rankdata(y_N) - 1)


def _is_constant(values_N: Array) -> bool:
    if values_N.size == 0 or np.ptp(values_N) == 0:
        return True
    scaled_N = values_N / np.abs(values_N).max()
    mean = scaled_N.mean()
    return bool(np.linalg.norm(scaled_N - mean) <= CONSTANT * abs(mean))
