"""The bound on a drop, and the smallest drop that rows can show."""

import math

import numpy as np
import pytest

from kdcli.metrics import scorer
from kdcli.metrics.resolution import exceeds, points_per_row
from kdcli.types import Task

METRICS = ("accuracy", "f1")
BINARY = Task("t", "class", ("text",), METRICS, labels=("a", "b"))


def test_a_row_has_a_worth_if_it_counts_0_or_1():
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 2, (2, 400)).tolist()
    sides = [scorer(BINARY, each, true) for each in (true, predicted)]
    assert points_per_row(sides, "accuracy", 400) == 0.25
    # One wrong row moves F1 by other amounts, although F1 of the reference itself is 1.
    assert points_per_row(sides, "f1", 400) == 0.0


def test_means_of_other_values_and_a_single_row_have_no_worth():
    values = np.linspace(0, 1, 11)
    ranks = lambda rows: {"ndcg": float(values[rows].mean())}  # noqa: E731
    assert points_per_row([ranks, ranks], "ndcg", 11) == 0.0
    right = lambda rows: {"accuracy": 1.0}  # noqa: E731
    assert points_per_row([right, right], "accuracy", 1) == 0.0


@pytest.mark.parametrize(
    ("drop", "bound", "is_more"),
    [
        (0.25, 0.1, False),
        (0.25, 0.0, True),
        (0.5, 0.25, True),
        (0.5, 0.3, False),
        (0.75, 0.3, True),
        (0.1 + 0.2, 0.3, False),
        (-1.0, 0.0, False),
        (math.nan, 1.0, True),
    ],
)
def test_less_than_one_of_400_rows_is_no_difference(drop, bound, is_more):
    assert exceeds(drop, bound, 0.25) == is_more


def test_without_a_tolerance_only_rounding_is_ignored():
    assert exceeds(0.11, 0.1)
    assert not exceeds(0.1, 0.1)
    assert not exceeds(0.1 + 0.2, 0.3)
    assert exceeds(math.nan, 0.1)
