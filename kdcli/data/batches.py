"""Which examples make up the batch of a step: pure functions of seed and step, so that resuming cannot change them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class BatchPlan:
    """Shuffled passes over `n` examples in batches of `batch_size`; a batch may straddle two passes.

    Every example comes exactly once in a pass, in an order drawn from (seed, pass).
    """

    n: int
    batch_size: int
    seed: int

    def indices(self, step: int) -> Indices:
        """The examples of a step (1-based), [batch_size] int64."""
        at = (step - 1) * self.batch_size + np.arange(self.batch_size)
        return np.concatenate(
            [_pass_order(self.n, self.seed, int(p))[at[at // self.n == p] % self.n] for p in np.unique(at // self.n)]
        )


@functools.lru_cache(maxsize=2)
def _pass_order(n: int, seed: int, number: int) -> Indices:
    return np.random.Generator(np.random.PCG64([seed, number])).permutation(n)
