"""Thresholds that reach a precision or a recall, next to a search over all thresholds."""

import numpy as np
import pytest
from sklearn.metrics import precision_score, recall_score

from kdcli.metrics.thresholds import (
    point_at,
    precision_recall_curve,
    reaching_precision,
    reaching_recall,
)


def drawn(n=300, seed=0, decimals=2):
    """Rounded probabilities, of which many are equal, and labels that they predict well."""
    generator = np.random.default_rng(seed)
    labels = (generator.random(n) < 0.3).astype(int)
    probs = generator.beta(2, 5, n) + 0.3 * labels
    return np.round(probs.clip(0.01, 0.99), decimals), labels


def scores(predicted, labels):
    """Precision and recall by their definitions."""
    right = (predicted & (labels == 1)).sum()
    return right / predicted.sum(), right / (labels == 1).sum()


def searched(probs, labels):
    """Precision and recall at a threshold below each probability."""
    return [scores(probs >= value, labels) for value in sorted(set(probs.tolist()))]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_point_of_all_thresholds_is_found(seed):
    probs, labels = drawn(seed=seed)
    curve, points = precision_recall_curve(probs, labels), searched(probs, labels)
    assert len(curve.thresholds) == len(points)
    for least in (0.35, 0.6, 0.8, 0.95):
        precise = reaching_precision(curve, least)
        best = max((r, p) for p, r in points if p >= least)
        assert (precise.recall, precise.precision) == pytest.approx(best)
        found = reaching_recall(curve, least)
        best = max((p, r) for p, r in points if r >= least)
        assert (found.precision, found.recall) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_a_point_is_what_its_threshold_gives(seed):
    probs, labels = drawn(seed=seed)
    curve = precision_recall_curve(probs, labels)
    for threshold, precision, recall in zip(*curve, strict=True):
        assert (precision, recall) == pytest.approx(scores(probs > threshold, labels))
    point = point_at(probs, labels, 0.5)
    predicted = (probs > 0.5).astype(int)
    assert (point.precision, point.recall) == pytest.approx(
        (precision_score(labels, predicted), recall_score(labels, predicted))
    )


def test_neighbouring_numbers_are_separated():
    # Their middle is rounded to 1.0, which is not above itself.
    probs = np.array([1.0, np.nextafter(1.0, 0.0), 0.2])
    curve = precision_recall_curve(probs, np.array([1, 0, 0]))
    assert [int((probs > t).sum()) for t in curve.thresholds] == [1, 2, 3]
    assert curve.precision.tolist() == [1.0, 0.5, 1 / 3]


def test_what_no_threshold_reaches_is_none():
    probs, labels = np.array([0.9, 0.8, 0.1]), np.array([0, 1, 0])
    curve = precision_recall_curve(probs, labels)
    assert reaching_precision(curve, 0.51) is None
    assert reaching_recall(curve, 1.0).threshold == pytest.approx(0.45)
    nothing = precision_recall_curve(probs, np.zeros(3))
    assert reaching_precision(nothing, 0.0) is None
    assert reaching_recall(nothing, 0.0) is None
    # A probability of 0 is above no threshold.
    assert reaching_recall(precision_recall_curve(np.array([0.5, 0.0]), np.ones(2)), 1.0) is None


def test_undefined_values_have_no_point():
    assert point_at(np.array([0.1, 0.2]), np.array([1, 0]), 0.5) is None
    assert point_at(np.array([0.6, 0.2]), np.array([0, 0]), 0.5) is None
    # Exactly one half is not above one half.
    assert point_at(np.array([0.5, 0.2]), np.array([1, 0]), 0.5) is None
