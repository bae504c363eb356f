"""Confidence intervals for differences between models, by the paired bootstrap.

Efron and Tibshirani 1993, section 16.
"""

from collections.abc import Callable

import numpy as np

from kdcli.types import Array

Scorer = Callable[[Array], dict[str, float]]
"""Scores the examples with the given indices, int64, which may repeat. Returns metric -> value."""


def paired_bootstrap(
    model: Scorer, baseline: Scorer, n: int, *, resamples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float, float]]:
    """Compare two models on the same examples.

    Args:
        model, baseline: scorers of the same `n` examples in the same order.
        n: number of examples.
        resamples: number of draws of `n` examples with replacement. Both models get the same draws.
        seed: seed of the draws.

    Returns:
        metric -> (difference over all examples, its 2.5 and its 97.5 percentile over the
        resamples), where a difference is the model's value minus the baseline's.

    Raises ValueError if there is nothing to draw from, or if the metrics of the two models differ.
    """
    if n < 1 or resamples < 1:
        raise ValueError(f"cannot draw {resamples} times from {n} examples")
    ours, theirs = model(np.arange(n)), baseline(np.arange(n))
    if list(ours) != list(theirs):
        raise ValueError(f"the model's metrics are {list(ours)}, the baseline's {list(theirs)}")
    generator = np.random.default_rng(seed)
    differences = np.empty((resamples, len(ours)))
    for row in differences:
        indices = generator.integers(n, size=n)
        row[:] = np.subtract(list(model(indices).values()), list(baseline(indices).values()))
    bounds = np.percentile(differences, [2.5, 97.5], axis=0).T.tolist()
    return {name: (ours[name] - theirs[name], *b) for name, b in zip(ours, bounds, strict=True)}
