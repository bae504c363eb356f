"""Metrics of classes and of several labels an example, against scikit-learn."""

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


def f1_of(predicted, true, label):
    found = np.sum((predicted == label) & (true == label), dtype=np.float64)
    there = np.sum(predicted == label) + np.sum(true == label)
    return 2 * found / there if there else 0.0


def matthews_of(predicted, true, classes):
    """The correlation of the indicator matrices of truth and prediction, over their centred
    entries."""
    x, y = (np.eye(classes, dtype=np.float64)[v] for v in (predicted, true))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    norm = np.sqrt((x * x).sum() * (y * y).sum())
    return (x * y).sum() / norm if norm > 1e-12 else 0.0


def expected(predicted, true, classes):
    predicted, true = np.asarray(predicted), np.asarray(true)
    macro = np.mean(
        [f1_of(predicted, true, c) for c in range(classes) if c in predicted or c in true]
    )
    return {
        "accuracy": np.mean(predicted == true),
        "f1": f1_of(predicted, true, 1) if classes == 2 else macro,
        "macro_f1": macro,
        "matthews": matthews_of(predicted, true, classes),
    }


@st.composite
def judged(draw):
    classes = draw(st.integers(2, 5))
    pairs = st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1))
    predicted, true = zip(*draw(st.lists(pairs, min_size=2, max_size=30)), strict=True)
    return classes, list(predicted), list(true)


@pytest.mark.filterwarnings(
    "ignore:A single label was found", "ignore:The number of unique classes"
)
@given(judged())
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


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.parametrize("kind", ["class", "multi", "tokens"])
def test_scores_of_each_class_are_those_of_scikit_learn(kind):
    labels = ("O", "a", "b", "c")
    drawn = np.random.default_rng(0)
    if kind == "class":
        predicted, true = ids = drawn.integers(3, size=(2, 20)).tolist()
    elif kind == "multi":
        predicted, true = ids = drawn.integers(2, size=(2, 20, 4)).tolist()
    else:
        predicted, true = (
            np.asarray(labels)[drawn.integers(3, size=(4, 5))].tolist() for _ in range(2)
        )
        ids = [[labels.index(tag) for tags in rows for tag in tags] for rows in (predicted, true)]
    found = per_class(Task("t", kind, ("text",), (), labels=labels), predicted, true)
    numbers = None if kind == "multi" else range(4)
    theirs = np.transpose(
        sklearn.metrics.precision_recall_fscore_support(*ids[::-1], labels=numbers, zero_division=0)
    )
    names = labels[1:] if kind == "tokens" else labels
    assert list(found) == list(names)
    for name in names:
        assert list(found[name]) == ["precision", "recall", "f1", "support"]
        assert list(found[name].values()) == pytest.approx(theirs[labels.index(name)].tolist())
        assert type(found[name]["support"]) is int


def test_a_single_label_is_scored_where_it_is_set():
    task = Task("t", "multi", ("text",), (), labels=("urgent",))
    assert per_class(task, [[1], [0], [1], [0]], [[1], [0], [0], [0]]) == {
        "urgent": {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1}
    }


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
