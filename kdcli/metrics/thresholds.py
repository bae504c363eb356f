"""Precision and recall of a label at a threshold, and thresholds that reach a given value."""

from typing import NamedTuple

import numpy as np

from kdcli.types import Array

DEFAULT_THRESHOLD = 0.5


class ThresholdPoint(NamedTuple):
    """A threshold, with precision and recall there. The label is predicted above the threshold."""

    threshold: float
    precision: float
    recall: float


def point_at(probs_N: Array, labels_N: Array, threshold: float) -> ThresholdPoint | None:
    """Return precision and recall at a threshold.

    Args:
        probs_N: The label's probability for each row.
        labels_N: 1 where the label applies, else 0.
        threshold: The label is predicted where its probability is higher.

    Returns:
        None if nothing is predicted or the label never applies, so that a value is undefined.
    """
    predicted_N, true_N = probs_N > threshold, labels_N > 0
    hits, predicted, true = (int(x.sum()) for x in (predicted_N & true_N, predicted_N, true_N))
    if not predicted or not true:
        return None
    return ThresholdPoint(threshold, hits / predicted, hits / true)


class Curve(NamedTuple):
    """Precision and recall of a label at every threshold that changes a prediction, each [K]."""

    thresholds: Array
    precision: Array
    recall: Array


def precision_recall_curve(probs_N: Array, labels_N: Array) -> Curve:
    """Return precision and recall for every set of rows that some threshold predicts.

    Thresholds lie halfway between neighbouring probabilities, the highest first; the last one is
    halfway between the smallest probability and 0. The curve is empty if the label never applies.

    Args:
        probs_N: The label's probability for each row.
        labels_N: 1 where the label applies, else 0.
    """
    order = np.argsort(-probs_N, kind="stable")
    sorted_N, true_N = probs_N[order], labels_N[order] > 0
    next_N = np.append(sorted_N[1:], 0.0)
    halfway_N = (sorted_N + next_N) / 2
    # Between neighbouring floating-point numbers, the middle may be rounded up.
    thresholds_N = np.where(halfway_N < sorted_N, halfway_N, next_N)
    # A threshold cannot separate equal probabilities.
    kept_N = (sorted_N != next_N) & true_N.any()
    hits_N, predicted_N = np.cumsum(true_N), np.arange(1, len(order) + 1)
    precision_N = hits_N / predicted_N
    recall_N = hits_N / max(int(true_N.sum()), 1)
    return Curve(thresholds_N[kept_N], precision_N[kept_N], recall_N[kept_N])


def reaching_precision(curve: Curve, precision: float) -> ThresholdPoint | None:
    """Return the point with the highest recall whose precision is at least a value.

    The result is None if no threshold reaches the value. Of points with equal recall, the one with
    the highest precision is returned.
    """
    return _best(curve, curve.precision >= precision, (curve.precision, curve.recall))


def reaching_recall(curve: Curve, recall: float) -> ThresholdPoint | None:
    """Return the point with the highest precision whose recall is at least a value.

    The result is None if no threshold reaches the value. Of points with equal precision, the one
    with the highest recall is returned.
    """
    return _best(curve, curve.recall >= recall, (curve.recall, curve.precision))


def _best(curve: Curve, allowed_K: Array, keys: tuple[Array, Array]) -> ThresholdPoint | None:
    """Return the allowed point with the highest last key, and of equal ones the highest first."""
    allowed = np.flatnonzero(allowed_K)
    if not len(allowed):
        return None
    best = allowed[np.lexsort([key[allowed] for key in keys])[-1]]
    return ThresholdPoint(*(float(values[best]) for values in curve))
