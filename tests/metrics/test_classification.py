"""Metrics of classes and of several labels an example, against scikit-learn and by hand."""

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kdcli.metrics import scorer
from kdcli.metrics.classification import confusion, per_class
from kdcli.types import Task

NAMES = ("accuracy", "f1", "macro_f1", "matthews")


def task_of(classes: int) -> Task:
    return Task("t", "class", ("text",), NAMES, labels=tuple(f"c{i}" for i in range(classes)))


@st.composite
def judged(draw, smallest=1):
    classes = draw(st.integers(2, 5))
    pairs = st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1))
    predicted, true = zip(*draw(st.lists(pairs, min_size=smallest, max_size=30)), strict=True)
    return classes, list(predicted), list(true)


@pytest.mark.filterwarnings(
    "ignore:A single label was found", "ignore:The number of unique classes"
)
@given(judged(smallest=2))
def test_metrics_are_those_of_scikit_learn_in_any_order(case):
    classes, predicted, true = case
    score = scorer(task_of(classes), predicted, true)
    found = score(np.arange(len(true)))
    averaged = {"labels": [1]} if classes == 2 else {}
    theirs = {
        "accuracy": sklearn.metrics.accuracy_score(true, predicted),
        "f1": sklearn.metrics.f1_score(
            true, predicted, average="macro", zero_division=0, **averaged
        ),
        "macro_f1": sklearn.metrics.f1_score(true, predicted, average="macro", zero_division=0),
        "matthews": sklearn.metrics.matthews_corrcoef(true, predicted),
    }
    assert (found, score(np.arange(len(true))[::-1])) == (pytest.approx(theirs, abs=1e-12), found)


def test_counts_are_by_truth_then_prediction():
    counts = confusion([0, 1, 1, 2], [0, 0, 1, 1], 4)
    assert counts.tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


PER_CLASS = {
    # Predictions, references, and class -> precision, recall, F1 and occurrences.
    "class": ([0, 1, 1, 1], [0, 0, 1, 2], {"a": (1, 0.5, 2 / 3, 2), "b": (1 / 3, 1, 0.5, 1)}),
    "multi": (
        [[1, 0, 0], [1, 1, 0]],
        [[1, 0, 0], [0, 1, 0]],
        {"a": (0.5, 1, 2 / 3, 1), "b": (1, 1, 1, 1)},
    ),
    "tokens": (
        [["O", "a"], ["b"]],
        [["a", "a"], ["b"]],
        {"a": (1, 0.5, 2 / 3, 2), "b": (1, 1, 1, 1)},
    ),
}


@pytest.mark.parametrize("kind", PER_CLASS)
def test_scores_of_each_class_by_hand(kind):
    predicted, true, expected = PER_CLASS[kind]
    labels = ("O", "a", "b", "c") if kind == "tokens" else ("a", "b", "c")
    found = per_class(Task("t", kind, ("text",), (), labels=labels), predicted, true)
    # No row is predicted as the last class.
    expected = expected | {"c": (0, 0, 0, int(kind == "class"))}
    names = ("precision", "recall", "f1", "support")
    assert found == {
        name: pytest.approx(dict(zip(names, values, strict=True)))
        for name, values in expected.items()
    }
    assert all(type(scores["support"]) is int for scores in found.values())


def test_scores_and_spans_have_no_classes():
    assert per_class(Task("t", "score", ("text",), ()), [1.0], [2.0]) == {}


@pytest.mark.parametrize("wrong", [-1, 3])
@pytest.mark.parametrize(
    "judge", [lambda p, r: scorer(task_of(3), p, r), lambda p, r: confusion(p, r, 3)]
)
def test_a_number_that_is_no_class_is_refused(judge, wrong):
    with pytest.raises(ValueError, match="must be between 0 and 2"):
        judge([0, wrong], [0, 1])
    with pytest.raises(ValueError, match="must be between 0 and 2"):
        judge([0, 1], [0, wrong])


MULTI = ("micro_f1", "macro_f1", "exact")
LABELS = 3
TASK = Task("t", "multi", ("text",), MULTI, labels=("a", "b", "c"))
PAIRS = st.integers(1, 12).flatmap(
    lambda n: arrays(np.int64, (2, n, LABELS), elements=st.integers(0, 1))
)


@given(PAIRS)
def test_multilabel_metrics_are_those_of_scikit_learn_in_any_order(pair):
    predicted, true = pair
    score = scorer(TASK, predicted, true)
    found = score(np.arange(len(true)))
    theirs = {
        "micro_f1": sklearn.metrics.f1_score(true, predicted, average="micro", zero_division=0),
        "macro_f1": sklearn.metrics.f1_score(true, predicted, average="macro", zero_division=0),
        "exact": sklearn.metrics.accuracy_score(true, predicted),
    }
    assert (found, score(np.arange(len(true))[::-1])) == (pytest.approx(theirs, abs=1e-12), found)


@pytest.mark.parametrize("wrong", [[[1, 0]], [[1, 0, 2]], [1]])
def test_what_is_not_an_indicator_of_labels_is_refused(wrong):
    with pytest.raises(ValueError, match=r"expected 0 and 1 of shape \[n, 3\]"):
        scorer(TASK, wrong, [[1, 0, 0]])
