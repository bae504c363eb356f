"""The bound on a drop, the smallest drop that rows can show, and the rows that show a bound."""

from collections.abc import Sequence

from kdcli.metrics.bootstrap import Scorer, WeightedScorer, example_values, is_binary

ROUNDING = 1e-9
"""Difference in points up to which two drops are equal."""


def points_per_row(scorers: Sequence[Scorer], metric: str, rows: int) -> float:
    """Return what one row is worth, in points, if every row counts 0 or 1 in a metric, else 0.

    In accuracy, one of 400 rows is worth 0.25 points. Metrics such as F1 and correlations have
    smaller steps.

    Args:
        scorers: The scorers of the models that are compared, on the same rows.
        metric: The name of the metric.
        rows: Number of rows.
    """
    for scorer in scorers:
        if isinstance(scorer, WeightedScorer) and scorer.weights(metric) is not None:
            return 0.0
        values_N = example_values(scorer, rows, seed=0).get(metric)
        if values_N is None or not len(values_N) or not is_binary(values_N):
            return 0.0
    return 100 / rows


def rows_within(drop: float, high: float, bound: float, rows: int) -> int | None:
    """Return about how many rows bring the upper end of a drop's interval down to a bound.

    The distance of the end from the drop shrinks with the square root of the number of rows, or
    faster. The result is None if the drop itself is not below the bound.

    Args:
        drop: The drop in points.
        high: The upper end of its interval.
        bound: The largest drop that is allowed.
        rows: The number of rows that gave the interval.
    """
    if drop >= bound:
        return None
    return round(rows * ((high - drop) / (bound - drop)) ** 2)


def exceeds(drop: float, bound: float, tolerance: float = 0.0) -> bool:
    """Return whether a drop is larger than a bound, by at least a tolerance.

    Args:
        drop: The drop in points. NaN exceeds every bound.
        bound: The largest drop that is allowed, in points.
        tolerance: The excess that is too large, in points; 0 allows no excess.
    """
    return not (drop <= bound + ROUNDING or drop - bound < tolerance - ROUNDING)
