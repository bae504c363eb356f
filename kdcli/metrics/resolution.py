"""The smallest difference of a metric that rows can show."""

from kdcli.metrics.bootstrap import OF_NUMBERS

ROUNDING = 1e-9
"""Difference in points up to which two drops are equal."""


def points_of_row(metric: str, rows: int) -> float:
    """Return the points (hundredths) that one row counts in a metric that is a share of rows.

    It is 0 for metrics of numbers, such as correlations, which have no smallest step.
    """
    return 0.0 if metric in OF_NUMBERS else 100 / rows


def exceeds(drop: float, bound: float, points: float) -> bool:
    """Return whether a drop is larger than a bound by at least the worth of one row.

    A smaller difference is no evidence, because one row alone decides it.

    Args:
        drop: the drop in points. NaN exceeds every bound.
        bound: the largest drop that is allowed, in points.
        points: the points that one row counts; see `points_of_row`.
    """
    return not (drop <= bound + ROUNDING or drop - bound < points - ROUNDING)
