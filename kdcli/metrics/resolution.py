"""The bound on a drop, and the smallest drop that rows can show."""

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


def exceeds(drop: float, bound: float, tolerance: float = 0.0) -> bool:
    """Return whether a drop is larger than a bound, by at least a tolerance.

    Args:
        drop: The drop in points. NaN exceeds every bound.
        bound: The largest drop that is allowed, in points.
        tolerance: The excess that is too large, in points; 0 allows no excess.
    """
    return not (drop <= bound + ROUNDING or drop - bound < tolerance - ROUNDING)
