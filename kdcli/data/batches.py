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


@dataclass(frozen=True)
class BucketPlan:
    """Shuffled passes in which the examples of a batch are of similar length, so that little of it is padding.

    Every example comes exactly once in a pass: pools of `pool` batches are drawn, each is sorted by length and cut into
    batches, and the batches of the pass are shuffled. They differ in size by one example at most. With a pool of 1
    every batch is random.
    """

    lengths: Indices
    batch_size: int
    seed: int
    pool: int = 64

    @property
    def steps_of_pass(self) -> int:
        """Batches of one pass."""
        return -(-len(self.lengths) // self.batch_size)

    def indices(self, step: int) -> Indices:
        """The examples of a step (1-based), [batch_size or fewer] int64."""
        number, place = divmod(step - 1, self.steps_of_pass)
        return self._batches(number)[place]

    def padding(self, number: int = 0) -> float:
        """Share of a pass's tokens that is padding."""
        batches = self._batches(number)
        padded = sum(len(b) * int(self.lengths[b].max()) for b in batches)
        return 1.0 - float(self.lengths.sum()) / padded

    def _batches(self, number: int) -> list[Indices]:
        if self._kept.get("number") != number:
            self._kept.update(number=number, batches=self._drawn(number))
        batches: list[Indices] = self._kept["batches"]
        return batches

    @functools.cached_property
    def _kept(self) -> dict[str, Any]:
        return {}

    def _drawn(self, number: int) -> list[Indices]:
        rng = np.random.Generator(np.random.PCG64([self.seed, number]))
        # Of nearly equal sizes: a remainder of one or two examples would make a step of noise.
        batches = np.array_split(rng.permutation(len(self.lengths)), self.steps_of_pass)
        found: list[Indices] = []
        for begin in range(0, len(batches), self.pool):
            pool = batches[begin : begin + self.pool]
            near = np.concatenate(pool)
            near = near[np.argsort(self.lengths[near], kind="stable")]
            found += np.split(near, np.cumsum([len(b) for b in pool])[:-1])
        return [found[i] for i in rng.permutation(len(found))]
