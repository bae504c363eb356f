"""The smallest difference that rows can show."""

import math

import pytest

from kdcli.metrics.resolution import exceeds, points_of_row


def test_a_row_counts_in_shares_only():
    assert points_of_row("accuracy", 400) == 0.25
    assert points_of_row("spearman", 400) == 0.0


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


def test_numbers_have_no_smallest_step():
    assert exceeds(0.11, 0.1, 0.0)
    assert not exceeds(0.1, 0.1, 0.0)
