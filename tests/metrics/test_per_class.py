"""Scores of every class, next to scikit-learn and to loops over entities."""

import numpy as np
import pytest
from sklearn.metrics import f1_score, recall_score

from kdcli.metrics.bootstrap import paired_bootstrap
from kdcli.metrics.per_class import (
    class_metrics,
    class_names,
    class_scorer,
    count_classes,
    largest_confusions,
)
from kdcli.types import Task

LABELS = ("red", "green", "blue")
CLASS = Task("t", "class", ("text",), ("accuracy",), LABELS)
MULTI = Task("t", "multi", ("text",), ("micro_f1",), LABELS)
TOKENS = Task("t", "tokens", ("tokens",), ("f1",), ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))


def scored(task, predictions, references, indices=None):
    scorer = class_scorer(task, count_classes(task, predictions, references))
    return scorer(np.arange(len(references)) if indices is None else indices)


def test_recall_and_f1_of_every_class_are_those_of_scikit_learn():
    predicted, true = np.random.default_rng(0).integers(3, size=(2, 90))
    indices = np.random.default_rng(1).integers(90, size=90)
    for chosen in (None, indices):
        p, t = (predicted, true) if chosen is None else (predicted[chosen], true[chosen])
        recall, f1 = recall_score(t, p, average=None), f1_score(t, p, average=None)
        expected = {f"recall {name}": r for name, r in zip(LABELS, recall, strict=True)}
        expected |= {f"f1 {name}": f for name, f in zip(LABELS, f1, strict=True)}
        assert scored(CLASS, predicted.tolist(), true.tolist(), chosen) == pytest.approx(expected)


def test_f1_of_every_label_is_the_one_of_scikit_learn():
    predicted, true = np.random.default_rng(0).integers(2, size=(2, 60, 3))
    indices = np.random.default_rng(1).integers(60, size=60)
    f1 = f1_score(true[indices], predicted[indices], average=None)
    assert scored(MULTI, predicted.tolist(), true.tolist(), indices) == pytest.approx(
        {f"f1 {name}": value for name, value in zip(LABELS, f1, strict=True)}
    )


def test_f1_of_every_type_counts_whole_entities():
    true = [
        ["B-PER", "I-PER", "O", "B-LOC"],
        ["B-LOC", "O", "B-LOC", "I-LOC"],
        ["O", "O", "B-PER", "O"],
    ]
    predicted = [
        ["B-PER", "O", "O", "B-LOC"],  # the person is cut short
        ["B-LOC", "O", "B-PER", "I-PER"],  # the second place is taken for a person
        ["O", "O", "B-PER", "O"],
    ]
    # People: 1 of 3 predictions is right, 2 are in the data. Places: 2 of 2, and 3.
    expected = {"f1 PER": 2 * 1 / (3 + 2), "f1 LOC": 2 * 2 / (2 + 3)}
    assert scored(TOKENS, predicted, true) == pytest.approx(expected)
    # Drawn twice, the second sentence counts twice.
    twice = {"f1 PER": 0.0, "f1 LOC": 2 * 2 / (2 + 4)}
    assert scored(TOKENS, predicted, true, np.array([1, 1])) == pytest.approx(twice)
    assert class_names(TOKENS) == ("PER", "LOC")
    assert class_metrics(TOKENS) == ("f1",)


def test_a_class_without_rows_scores_0():
    assert scored(CLASS, [0, 1], [0, 0]) == pytest.approx(
        {"recall red": 0.5, "recall green": 0, "recall blue": 0}
        | {"f1 red": 2 / 3, "f1 green": 0, "f1 blue": 0}
    )


def test_the_interval_of_a_class_is_about_its_rows():
    # The models differ in class 1 alone, by 30 of its 100 rows.
    true = np.repeat([0, 1], [400, 100])
    baseline, model = true.copy(), true.copy()
    model[400:430] = 0
    scorers = [class_scorer(CLASS, count_classes(CLASS, p, true)) for p in (model, baseline)]
    found = paired_bootstrap(*scorers, 500, resamples=2000)
    difference, low, high = found["recall red"]
    assert (difference, low) == (0, pytest.approx(-high))
    # The models agree on all 400 rows of the class.
    assert high == pytest.approx(1.96**2 / (400 + 1.96**2), abs=1e-4)
    difference, low, high = found["recall green"]
    assert difference == pytest.approx(-0.3)
    # The standard error of a share of 0.3 among 100 rows is 0.0458.
    assert (low, high) == pytest.approx((-0.3 - 1.96 * 0.0458, -0.3 + 1.96 * 0.0458), abs=0.012)


@pytest.mark.parametrize("rows", [160, 3000])
@pytest.mark.parametrize("hits", [0, 23])
def test_the_interval_of_a_class_without_a_change_is_about_its_rows(rows, hits):
    true = np.repeat([1, 0], [23, rows - 23])
    predicted = np.repeat([1, 0], [hits, rows - hits])
    scorer = class_scorer(CLASS, count_classes(CLASS, predicted, true))
    found = paired_bootstrap(scorer, scorer, rows, resamples=20)
    expected = 1.96**2 / (23 + 1.96**2)
    for metric in ("recall green", "f1 green"):
        # With many rows, the bound is z * sqrt(2) / 23.
        bound = expected if rows == 160 else 1.96 * 2**0.5 / 23
        assert found[metric] == pytest.approx((0, -bound, bound), abs=1e-4)
    # Nothing is known about a class without rows.
    assert found["recall blue"] == (0, -1, 1)


def test_the_interval_of_a_type_without_a_change_is_about_its_sentences():
    true = [["B-PER", "O"]] * 7 + [["O", "O"]] * 42
    scorer = class_scorer(TOKENS, count_classes(TOKENS, true, true))
    found = paired_bootstrap(scorer, scorer, 49, resamples=20, baseline_is_reference=True)
    assert found["f1 PER"] == pytest.approx((0, -(1.96**2) / (7 + 1.96**2), 0), abs=1e-4)


def test_the_largest_confusions_come_first():
    counts = np.array([[90, 2, 5], [5, 80, 0], [1, 9, 70]])
    assert largest_confusions(counts, 4) == [(2, 1, 9), (0, 2, 5), (1, 0, 5), (0, 1, 2)]
    assert largest_confusions(counts, 20)[-1] == (2, 0, 1)
    assert largest_confusions(np.diag([3, 4]), 5) == []
