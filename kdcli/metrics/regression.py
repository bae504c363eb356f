"""Metrics of tasks with a number per example. The correlations come from SciPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.types import Task

# Deviation, relative to the mean, below which SciPy treats values as constant.
CONSTANT = 1e-13


def scorer(task: Task, predictions: Sequence[float], references: Sequence[float]) -> Scorer:
    """Score by `pearson`, `spearman` and `mse`. A correlation with a constant is 0.

    `predictions` and `references` have shape [n]. Raises UsageError if a prediction is not finite.
    """
    predicted = np.asarray(predictions, dtype=np.float64)
    true = np.asarray(references, dtype=np.float64)
    if bad := int((~np.isfinite(predicted)).sum()):
        message = f"{bad} of {len(predicted)} predictions of task {task.name} are not finite"
        raise UsageError(message, "the weights are broken or overflow in this dtype: try float32")

    def score(indices: Array) -> dict[str, Any]:
        p, t = predicted[indices], true[indices]
        constant = _constant(p) or _constant(t)
        return {
            "pearson": 0.0 if constant else pearsonr(p, t).statistic,
            "spearman": 0.0 if constant else spearmanr(p, t).statistic,
            "mse": np.mean((t - p) ** 2),
        }

    return score


def _constant(values: Array) -> bool:
    mean = values.mean()
    return bool(np.ptp(values) == 0 or np.linalg.norm(values - mean) <= CONSTANT * abs(mean))
