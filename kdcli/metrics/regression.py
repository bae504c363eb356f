"""Metrics of tasks with a number per example. The correlations come from SciPy."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import pearsonr, spearmanr

from kdcli.metrics.bootstrap import Scorer
from kdcli.metrics.finite import check_finite
from kdcli.types import Array, Task

# Deviation, relative to the mean, below which SciPy treats values as constant.
CONSTANT = 1e-13


def scorer(task: Task, predictions: Sequence[float], references: Sequence[float]) -> Scorer:
    """Score by `pearson`, `spearman` and `mse`. A correlation with a constant is 0.

    `predictions` and `references` have shape [n]. Raises UsageError if a prediction is not finite.
    """
    predicted = np.asarray(predictions, dtype=np.float64)
    true = np.asarray(references, dtype=np.float64)
    check_finite(predicted, f"predictions of task {task.name}")

    def score(indices: Array) -> dict[str, float]:
        p, t = predicted[indices], true[indices]
        constant = _constant(p) or _constant(t)
        return {
            "pearson": 0.0 if constant else pearsonr(p, t).statistic,
            "spearman": 0.0 if constant else spearmanr(p, t).statistic,
            "mse": float(np.mean((t - p) ** 2)),
        }

    return score


def _constant(values: Array) -> bool:
    mean = values.mean()
    return bool(np.ptp(values) == 0 or np.linalg.norm(values - mean) <= CONSTANT * abs(mean))
