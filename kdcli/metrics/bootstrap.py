"""Confidence intervals for differences between models on the same examples.

Most intervals come from the paired bootstrap (Efron and Tibshirani 1993, section 16). With few
examples it is too narrow, because models that differ in 2 % of all texts may agree on all 50
examples. Metrics that are shares of correct examples therefore get Tango's score interval, and the
bootstrap's interval is widened by the effect of a single example.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, runtime_checkable

import numpy as np

from kdcli.types import Array

Scorer = Callable[[Array], dict[str, float]]
"""Scores the examples with the given indices, int64, which may repeat. Returns metric -> value."""


@runtime_checkable
class ScorerWithValues(Protocol):
    """A scorer that knows the values of single examples, so that no jackknife is needed."""

    def __call__(self, rows: Array, /) -> dict[str, float]:
        """Score the examples with the given indices."""

    def example_values(self) -> Mapping[str, Array]:
        """Return each example's value of every metric but the ones in `OF_NUMBERS`, [n]."""


@dataclass(frozen=True)
class WeightedScorer:
    """A scorer of metrics that do not depend on all examples equally.

    Attributes:
        score: The scorer.
        weights: Returns the weight of each example in a metric, [n], or None if all are equal. The
            recall of a class, for example, depends on the examples of the class alone.
    """

    score: Scorer
    weights: Callable[[str], Array | None]

    def __call__(self, rows: Array) -> dict[str, float]:
        """Score the examples with the given indices."""
        return self.score(rows)


Interval = tuple[float, float, float]
"""A difference between two models, and the ends of its interval."""
CONFIDENCE = 0.95
"""Default level of intervals."""
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
FEW_EXAMPLES, SAMPLE = 2000, 500
"""With more than the first number of examples, only a sample shows the effect of one example."""
ERRORS = ("mse",)
"""Metrics that are lower for a better model."""
OF_NUMBERS = ("pearson", "spearman", "mse")
"""Metrics of numbers. Two models that differ at all differ in nearly every number."""
RANGES = {
    **dict.fromkeys(("pearson", "spearman", "matthews", "cosine"), (-1.0, 1.0)),
    **dict.fromkeys(("mse", "loss"), (0.0, math.inf)),
    **dict.fromkeys(("best_exact_threshold", "best_f1_threshold"), (-math.inf, math.inf)),
}
"""Maps a metric that is not between 0 and 1 to its range."""


def range_of(metric: str) -> tuple[float, float]:
    """Return the lowest and the highest value that a metric can have."""
    return RANGES.get(metric, (0.0, 1.0))


def paired_bootstrap(
    model: Scorer,
    baseline: Scorer,
    n: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    baseline_is_reference: bool = False,
    groups: Array | None = None,
) -> dict[str, Interval]:
    """Compare two models on the same examples.

    Examples with the same text are not independent: up to case and spaces, both models read the
    same. Such examples are resampled together, and the other intervals count fewer examples: their
    number over the mean number of examples of a text. That mean is over all texts or, for Tango's
    interval, over the examples on which the models differ, if it is larger there. A frequent text
    on which both models agree thus does not widen the interval.

    The interval of a metric depends on what the metric does with one example:

    * If every example counts as 0 or 1, as in accuracy, it is `tango_interval`.
    * Otherwise, its ends are percentiles of the difference over the resamples, the 2.5 and the 97.5
      for 95 %. To each end's distance from the difference, the interval of two opposite examples is
      added as in a root of a sum of squares: z * sqrt(2) times the largest effect of one example,
      where z is 1.96 for 95 %. This is the idea of Bonett and Price 2012, who add one example to
      each of the two models' counts.
    * Metrics of numbers, such as correlations, are only widened if no example differs.

    A `WeightedScorer` tells how many examples a metric depends on: the recall of a class with 23 of
    160 examples on 23. No interval reaches beyond the metric's largest possible difference.

    Args:
        model, baseline: Scorers of the same `n` examples in the same order.
        n: Number of examples.
        resamples: Number of draws of `n` examples with replacement. Both models get the same draws.
        seed: Seed of the draws.
        confidence: The level of the intervals.
        baseline_is_reference: Whether the examples are scored against the baseline's own outputs.
            No model can then be better than the baseline, so each interval ends at 0.
        groups: The number of each example's group, [n] int64; None if all are independent.

    Returns:
        metric -> (difference over all examples, low, high), where a difference is the model's value
        minus the baseline's.

    Raises ValueError if there is nothing to draw from, or if the metrics of the two models differ.
    """
    if n < 1 or resamples < 1:
        raise ValueError(f"cannot draw {resamples} times from {n} examples")
    ours, theirs = model(np.arange(n)), baseline(np.arange(n))
    if list(ours) != list(theirs):
        raise ValueError(f"the model's metrics are {list(ours)}, the baseline's {list(theirs)}")
    draws = _draws(n, groups, resamples, seed)
    differences = _resampled_differences(model, baseline, draws, (resamples, len(ours)))
    sizes_N = np.ones(n) if groups is None else np.bincount(groups)[groups]
    outside = 50 * (1 - confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    bounds = np.percentile(differences, [outside, 100 - outside], axis=0).T.tolist()
    values, base_values = (example_values(scorer, n, seed) for scorer in (model, baseline))
    is_same = not differences.any()
    intervals: dict[str, Interval] = {}
    for (name, value), (low, high) in zip(ours.items(), bounds, strict=True):
        difference = value - theirs[name]
        weights_N = _weights(name, n, model, baseline)
        if name in OF_NUMBERS:
            effect = _mean_size(sizes_N, np.ones(n)) / n if is_same else 0.0
        elif _are_shares(values[name], base_values[name], n):
            ends = _interval_of_shares(values[name], base_values[name], sizes_N, weights_N, z)
            intervals[name] = (difference, *ends)
            continue
        else:
            is_sample = len(values[name]) != n
            read = sizes_N[_sample(n, seed)] if is_sample else sizes_N
            of_models = [(values[name], value), (base_values[name], theirs[name])]
            effect = max(_largest_effect(each_N, mean, read) for each_N, mean in of_models) / n
            if is_sample or not any(np.ptp(each_N) for each_N, _ in of_models):
                # No value, or no value of the sample, shows the effect of an example.
                repeats = _mean_size(sizes_N, weights_N)
                effect = max(effect, repeats / max(_count_equal(weights_N), 1.0))
        added = z * math.sqrt(2.0) * effect
        lowest, highest = range_of(name)
        intervals[name] = _widened((difference, low, high), added, highest - lowest)
    return _at_most_reference(intervals) if baseline_is_reference else intervals


def _are_shares(values_N: Array, base_N: Array, n: int) -> bool:
    """Whether every example counts as 0 or 1 for both models, and all values are known."""
    return len(values_N) == n and is_binary(values_N) and is_binary(base_N)


def _weights(name: str, n: int, *scorers: Scorer) -> Array:
    """Return the weight of each example in a metric of two models, [n]."""
    of_models = (s.weights(name) if isinstance(s, WeightedScorer) else None for s in scorers)
    return sum((np.ones(n) if each_N is None else each_N for each_N in of_models), np.zeros(n))


def _count_equal(weights_N: Array) -> float:
    """Return how many equally weighted examples have a mean of the same variance (Kish 1965)."""
    squares = float(np.square(weights_N).sum())
    return float(weights_N.sum()) ** 2 / squares if squares else 0.0


def _interval_of_shares(
    values_N: Array, base_values_N: Array, sizes_N: Array, weights_N: Array, z: float
) -> tuple[float, float]:
    """Return Tango's interval of the difference between two models' shares of correct examples.

    Args:
        values_N, base_values_N: Whether each model is right, 0 or 1 up to rounding.
        sizes_N: The number of examples with each example's text.
        weights_N: The weight of each example.
        z: The quantile of the normal distribution for the wanted level.
    """
    if not weights_N.any():
        return -1.0, 1.0
    correct_N, base_N = np.rint(values_N), np.rint(base_values_N)
    better, worse = (
        float(weights_N[differs_N].sum() / weights_N.sum())
        for differs_N in (correct_N > base_N, correct_N < base_N)
    )
    count = _count_equal(weights_N) / _repeats(sizes_N, weights_N, correct_N != base_N)
    return tango_interval(better * count, worse * count, count, z)


def _widened(interval: Interval, added: float, most: float) -> Interval:
    """Add a distance to both ends in quadrature, up to `most` from 0."""
    difference, low, high = interval
    return (
        difference,
        max(difference - math.hypot(difference - low, added), -most),
        min(difference + math.hypot(high - difference, added), most),
    )


def _at_most_reference(intervals: Mapping[str, Interval]) -> dict[str, Interval]:
    """End all intervals at 0 where a model would be better than its reference."""
    return {
        name: (value, max(low, 0.0), high) if name in ERRORS else (value, low, min(high, 0.0))
        for name, (value, low, high) in intervals.items()
    }


def _draws(n: int, groups: Array | None, resamples: int, seed: int) -> Iterator[Array]:
    """Yield the examples of each resample, drawn with replacement, in whole groups."""
    generator = np.random.default_rng(seed)
    if groups is None:
        for _ in range(resamples):
            yield generator.integers(n, size=n)
        return
    count = int(groups.max()) + 1
    for _ in range(resamples):
        times = np.bincount(generator.integers(count, size=count), minlength=count)
        yield np.repeat(np.arange(n), times[groups])


def _resampled_differences(
    model: Scorer, baseline: Scorer, draws: Iterable[Array], size: tuple[int, int]
) -> Array:
    """Return the differences of all metrics for each draw of examples, [resamples, metrics]."""
    differences = np.empty(size)
    for row, indices in zip(differences, draws, strict=True):
        row[:] = np.subtract(list(model(indices).values()), list(baseline(indices).values()))
    return differences


def _largest_effect(values_N: Array, mean: float, sizes_N: Array) -> float:
    """Return the largest effect of one text on a metric, times the number of examples.

    It is the range of the pseudo-values, times the mean number of examples of a text. The mean is
    weighted by each example's effect: texts of other classes do not change the recall of a class.

    Args:
        values_N: The pseudo-values of one model; empty for a single example.
        mean: The metric.
        sizes_N: The number of examples with each example's text.
    """
    if not len(values_N):
        return 1.0
    return max(1.0, float(np.ptp(values_N))) * _mean_size(sizes_N, np.abs(values_N - mean))


def _mean_size(sizes_N: Array, weights_N: Array) -> float:
    """Return the mean number of examples of a text, weighted by its examples' mean weight."""
    if not weights_N.any():
        weights_N = np.ones(len(sizes_N))
    return float(weights_N.sum() / (weights_N / sizes_N).sum())


def _repeats(sizes_N: Array, weights_N: Array, differs_N: Array) -> float:
    """Return how many examples count as one in Tango's interval.

    It is the mean number of examples of a text or, if it is larger, the mean size of the groups
    of the examples on which the models differ. The latter is the factor by which the groups
    increase the variance of the difference.
    """
    mean = _mean_size(sizes_N, weights_N)
    differing_N = weights_N * differs_N
    if not differing_N.any():
        return mean
    return max(mean, float(np.average(sizes_N, weights=differing_N)))


def _sample(n: int, seed: int) -> Array:
    """Choose the examples whose values are computed: all, or a sample of many."""
    if n <= FEW_EXAMPLES:
        return np.arange(n)
    return np.random.default_rng(seed).choice(n, SAMPLE, replace=False)


def tango_interval(
    only_model: float, only_baseline: float, n: float, z: float = Z
) -> tuple[float, float]:
    """Return the interval of the difference between two shares of the same examples.

    It holds the differences that the score test does not reject (Tango 1998, equations 5 to 7). If
    no example differs, its ends are -z^2 / (n + z^2) and z^2 / (n + z^2).

    Args:
        only_model: Number of examples that only the model gets right.
        only_baseline: Number of examples that only the baseline gets right.
        n: Number of examples.
        z: The quantile of the normal distribution for the wanted level, 1.96 for 95 %.
    """
    estimate = (only_model - only_baseline) / n

    def statistic(delta: float) -> float:
        # q is the likeliest share of examples that only the baseline gets right, given delta.
        b = (2 * n - only_model + only_baseline) * delta - only_model - only_baseline
        c = -only_baseline * delta * (1 - delta)
        q = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
        variance = n * (2 * q + delta * (1 - delta))
        far = n * (estimate - delta)
        return abs(far) / math.sqrt(variance) if variance > 0 else math.inf if far else 0.0

    def end(outside: float) -> float:
        inside = estimate
        for _ in range(50):
            middle = (inside + outside) / 2
            if statistic(middle) <= z:
                inside = middle
            else:
                outside = middle
        return inside

    return end(-1.0), end(1.0)


def example_values(scorer: Scorer, n: int, seed: int) -> Mapping[str, Array]:
    """Return each example's share of a metric, as the jackknife's pseudo-values.

    The pseudo-value of an example is n * m - (n - 1) * m', where m' is the metric without the
    example (Efron and Tibshirani 1993, section 11). In a mean over examples, it is the example's
    own value.

    Returns:
        metric -> [n], or [SAMPLE] if there are more than FEW_EXAMPLES, or [0] for one example.
    """
    if isinstance(scorer, ScorerWithValues):
        return scorer.example_values()
    every = np.arange(n)
    whole = scorer(every)
    if n < 2:
        return {name: np.empty(0) for name in whole}
    rest = [scorer(np.delete(every, example)) for example in _sample(n, seed)]
    return {
        name: n * value - (n - 1) * np.array([without[name] for without in rest])
        for name, value in whole.items()
    }


def is_binary(values: Array) -> bool:
    """Whether all values are 0 or 1, up to rounding."""
    rounded = np.rint(values)
    return bool(np.isin(rounded, (0.0, 1.0)).all() and np.abs(values - rounded).max() < 1e-6)
