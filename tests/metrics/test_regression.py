"""Correlations and errors against formulas written out."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdcli.errors import UsageError
from kdcli.metrics import scorer
from kdcli.metrics.library import TaskMetric
from kdcli.types import Task

NAMES = ("pearson", "spearman", "mse")
TASK = Task("t", "score", ("text",), NAMES)
# A grid, so that ties occur and nothing cancels to rounding errors.
NUMBERS = st.integers(-40, 40).map(lambda i: i / 8)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=25)


def correlation(x, y):
    x, y = x - x.mean(), y - y.mean()
    norm = np.sqrt((x * x).sum() * (y * y).sum())
    return (x * y).sum() / norm if norm > 1e-12 else 0.0


def ranks(x):
    """The mean of the places that equal values share."""
    return np.array([np.sum(x < v) + (np.sum(x == v) + 1) / 2 for v in x], dtype=np.float64)


@given(PAIRS)
def test_metrics_are_the_formulas(pairs):
    predicted, true = np.array(pairs, dtype=np.float64).T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = TaskMetric(TASK).compute(predictions=predicted.tolist(), references=true.tolist())
    assert list(found) == list(NAMES)
    assert all(type(value) is float for value in found.values())
    assert found == pytest.approx(
        {
            "pearson": correlation(predicted, true),
            "spearman": correlation(ranks(predicted), ranks(true)),
            "mse": sum((p - t) ** 2 for p, t in pairs) / len(pairs),
        },
        abs=1e-9,
    )


@pytest.mark.parametrize(
    ("predicted", "true"),
    [
        ([0.1] * 7, [1, 2, 3, 4, 5, 6, 7]),
        ([1, 2, 3, 4, 5, 6, 7], [2.5] * 7),
        ([1e9 + i * 1e-7 for i in range(7)], [1, 2, 3, 4, 5, 6, 7]),
        ([1.0], [2.0]),
    ],
)
def test_correlation_of_a_constant_is_zero_without_a_warning(predicted, true):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = TaskMetric(TASK).compute(predictions=predicted, references=true)
    assert (found["pearson"], found["spearman"]) == (0.0, 0.0)
    assert np.isfinite(found["mse"])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_predictions_that_are_not_finite_are_told(value):
    with pytest.raises(UsageError, match="1 of 2 predictions of task t are not finite"):
        scorer(TASK, [1.0, value], [1.0, 2.0])
