"""Metrics of tasks with a number for each example; correlations by SciPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from kdcli.errors import UsageError
from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.types import Task

CONSTANT = 1e-13  # deviation relative to the mean below which SciPy treats the values as constant


def scorer(task: Task, predictions: Sequence[float], references: Sequence[float]) -> Scorer:
    """Score by `pearson`, `spearman`, `mse`; a correlation with a constant is 0. `predictions`, `references`: [n].
    Raises UsageError: a prediction that is not finite."""
    predicted, true = (
        np.asarray(predictions, dtype=np.float64),
        np.asarray(references, dtype=np.float64),
    )
    if wrong := int((~np.isfinite(predicted)).sum()):
        message = f"{wrong} of {len(predicted)} predictions of task {task.name} are not finite"
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
