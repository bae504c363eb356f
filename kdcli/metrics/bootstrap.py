"""How sure a difference between two models is: paired bootstrap (Efron and Tibshirani 1993, section 16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

Scorer = Callable[[Array], dict[str, float]]
"""Scores a selection of examples, given by their indices, [any] int64; an index may repeat. Metric → value."""


def paired_bootstrap(
    of_model: Scorer, of_baseline: Scorer, n: int, *, resamples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float, float]]:
    """Differences between two models judged on the same examples.

    Args:
        of_model, of_baseline: both over the same `n` examples in the same order.
        resamples: how often `n` of the examples are drawn with repetition; both models get the same draws.
        seed: of the draws.

    Returns:
        Metric → (model minus baseline over all examples, 2.5 percentile, 97.5 percentile of it over the resamples).

    Raises:
        ValueError: there is nothing to draw from, or the two report different metrics.
    """
    if n < 1 or resamples < 1:
        raise ValueError(f"cannot draw {resamples} times from {n} examples")
    everything = np.arange(n)
    model, baseline = of_model(everything), of_baseline(everything)
    if list(model) != list(baseline):
        raise ValueError(f"metrics {list(model)} of the model, {list(baseline)} of the baseline")
    generator = np.random.default_rng(seed)
    differences = np.empty((resamples, len(model)))
    for row in differences:
        indices = generator.integers(n, size=n)
        row[:] = np.subtract(list(of_model(indices).values()), list(of_baseline(indices).values()))
    low, high = np.percentile(differences, [2.5, 97.5], axis=0)
    return {name: (model[name] - baseline[name], float(low[i]), float(high[i])) for i, name in enumerate(model)}
