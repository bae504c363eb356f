"""Confidence intervals for differences between models: paired bootstrap (Efron and Tibshirani 1993, section 16)."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Scorer = Callable[[Array], dict[str, float]]
"""Scores the examples of the given indices, [any] int64; an index may repeat. Returns metric -> value."""


def paired_bootstrap(
    model: Scorer, baseline: Scorer, n: int, *, resamples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float, float]]:
    """Differences between two models on the same examples. `model`, `baseline`: scorers over the same `n` examples in
    the same order. `resamples`: draws of `n` examples with repetition; both models get the same draws. `seed`: of the
    draws. Returns metric -> (model minus baseline over all examples, 2.5 and 97.5 percentile of it over the resamples).
    Raises ValueError: nothing to draw from, or different metrics."""
    if n < 1 or resamples < 1:
        raise ValueError(f"cannot draw {resamples} times from {n} examples")
    ours, theirs = model(np.arange(n)), baseline(np.arange(n))
    if list(ours) != list(theirs):
        raise ValueError(f"metrics {list(ours)} of the model, {list(theirs)} of the baseline")
    generator = np.random.default_rng(seed)
    differences = np.empty((resamples, len(ours)))
    for row in differences:
        indices = generator.integers(n, size=n)
        row[:] = np.subtract(list(model(indices).values()), list(baseline(indices).values()))
    bounds = np.percentile(differences, [2.5, 97.5], axis=0).T.tolist()
    return {name: (ours[name] - theirs[name], *b) for name, b in zip(ours, bounds, strict=True)}
