"""Metrics of several labels an example against formulas written out, and against scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kdcli.metrics import scorer
from kdcli.metrics.library import TaskMetric
from kdcli.types import Task

NAMES = ("micro_f1", "macro_f1", "exact")
LABELS = 3
TASK = Task("t", "multi", ("text",), NAMES, labels=("a", "b", "c"))
PAIRS = st.integers(1, 12).flatmap(lambda n: arrays(np.int64, (2, n, LABELS), elements=st.integers(0, 1)))


def f1_of(predicted, true):
    found, there = np.sum(predicted & true, dtype=np.float64), np.sum(predicted) + np.sum(true)
    return 2 * found / there if there else 0.0


@given(PAIRS)
def test_metrics_are_the_formulas(pair):
    predicted, true = pair
    found = TaskMetric(TASK).compute(predictions=predicted.tolist(), references=true.tolist())
    assert list(found) == list(NAMES)
    assert all(type(value) is float for value in found.values())
    assert found == pytest.approx(
        {
            "micro_f1": f1_of(predicted.ravel(), true.ravel()),
            "macro_f1": np.mean([f1_of(predicted[:, c], true[:, c]) for c in range(LABELS)]),
            "exact": np.mean([p.tolist() == t.tolist() for p, t in zip(predicted, true, strict=True)]),
        },
        abs=1e-12,
    )


@given(PAIRS)
def test_metrics_are_those_of_scikit_learn_in_any_order(pair):
    predicted, true = pair
    score = scorer(TASK, predicted, true)
    found = score(np.arange(len(true)))
    theirs = {
        "micro_f1": sklearn.metrics.f1_score(true, predicted, average="micro", zero_division=0),
        "macro_f1": sklearn.metrics.f1_score(true, predicted, average="macro", zero_division=0),
        "exact": sklearn.metrics.accuracy_score(true, predicted),
    }
    assert found == pytest.approx(theirs, abs=1e-12)
    assert score(np.arange(len(true))[::-1]) == found


def test_by_hand():
    # Found 1, predicted 2, true 3 in all; label a is right, b is missed, c is found where it is not.
    found = TaskMetric(TASK).compute(predictions=[[1, 0, 1], [0, 0, 0]], references=[[1, 1, 0], [0, 1, 0]])
    assert found == pytest.approx({"micro_f1": 2 / 5, "macro_f1": 1 / 3, "exact": 0.0})


@pytest.mark.parametrize("wrong", [[[1, 0]], [[1, 0, 2]], [1]])
def test_what_is_not_an_indicator_of_labels_is_refused(wrong):
    with pytest.raises(ValueError, match=r"expected 0 and 1 of shape \[n, 3\]"):
        scorer(TASK, wrong, [[1, 0, 0]])
