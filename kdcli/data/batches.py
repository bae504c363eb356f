"""The order of examples.

It is a pure function of the seed and the step, so resuming a run does not change it.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

# Rounds of the Feistel network. Three rounds make it pseudo-random (Luby and Rackoff 1988), but
# halves of few bits need more.
FEISTEL_ROUNDS = 8
# The odd multipliers of splitmix64 (Steele, Lea and Flood 2014).
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class BatchOrder:
    """Shuffled passes over `n` examples in batches of `batch_size`.

    Every pass has each example exactly once, in an order drawn from (seed, pass). A batch may
    straddle two passes. Memory does not depend on `n`.
    """

    n: int
    batch_size: int
    seed: int

    def indices(self, step: int) -> Indices:
        """Return the examples of a step (1-based), [batch_size] int64."""
        passes, positions = np.divmod(self._numbers(step), self.n)
        parts = [
            permuted(positions[passes == number], self.n, self.seed, int(number))
            for number in np.unique(passes)
        ]
        return np.concatenate(parts)

    def passes(self, step: int) -> Indices:
        """Return the pass of each example of a step, counted from 0, [batch_size] int64."""
        return self._numbers(step) // self.n

    def _numbers(self, step: int) -> Indices:
        return np.arange((step - 1) * self.batch_size, step * self.batch_size)


def permuted(positions: Indices, n: int, *key: int) -> Indices:
    """Return the values of a random permutation of `range(n)` at some positions.

    Each value is computed independently. A Feistel network permutes the numbers with the next even
    number of bits. It is repeated until the result is below `n` (cycle walking).

    Args:
        positions: Positions in the permutation, int64.
        n: The size of the permutation.
        key: The numbers that the permutation is drawn from.
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(key).generate_state(FEISTEL_ROUNDS, np.uint64)
    values = positions.astype(np.uint64)
    todo = np.arange(len(values))
    while len(todo):
        left, right = values[todo] >> half, values[todo] & low
        for round_key in keys:
            mixed = (right ^ round_key) * MIX[0]
            mixed = (mixed ^ (mixed >> np.uint64(27))) * MIX[1]
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & low)
        values[todo] = left << half | right
        todo = todo[values[todo] >= n]
    return values.astype(np.int64)


@dataclass(frozen=True)
class BucketOrder:
    """Shuffled passes in batches of groups with examples of similar length, which saves padding.

    Every pass has each example exactly once:

    1. Pools of `pool` batches are drawn at random.
    2. Each pool is sorted by length and cut into groups of `group` examples.
    3. The groups are assigned to the pool's batches at random.
    4. The batches of the pass are shuffled.

    A micro-batch of `group` examples has little padding, but a batch has mixed lengths. Batches of
    one length would be biased if the length depends on the label or the source. The sizes of
    batches differ by at most one example. With a pool of 1, every batch is random and sorted by
    length.
    """

    lengths: Indices
    batch_size: int
    group: int
    seed: int
    pool: int = 64

    @property
    def n(self) -> int:
        """The number of examples in a pass."""
        return len(self.lengths)

    def passes(self, step: int) -> int:
        """Return the pass of a step, counted from 0."""
        return (step - 1) // self.steps_of_pass

    @property
    def steps_of_pass(self) -> int:
        """The number of batches in a pass."""
        return -(-len(self.lengths) // self.batch_size)

    def indices(self, step: int) -> Indices:
        """Return the examples of a step (1-based), group by group, [batch_size or less] int64."""
        number, position = divmod(step - 1, self.steps_of_pass)
        return self._batches(number)[position]

    def padding(self, number: int = 0) -> float:
        """Return the share of padding if each group is padded to its longest example."""
        groups = [g for b in self._batches(number) for g in self._groups(b)]
        padded = sum(len(g) * int(self.lengths[g].max()) for g in groups)
        return 1.0 - float(self.lengths.sum()) / padded

    def _groups(self, batch: Indices) -> list[Indices]:
        return np.array_split(batch, -(-len(batch) // self.group))

    @functools.cached_property
    def _latest(self) -> dict[int, list[Indices]]:
        return {}

    def _batches(self, number: int) -> list[Indices]:
        """Return the batches of a pass. The batches of the latest pass are cached."""
        if number in self._latest:
            return self._latest[number]
        rng = np.random.Generator(np.random.PCG64([self.seed, number]))
        # Batches have nearly equal sizes. A step on one or two remaining examples would be noise.
        batches = np.array_split(rng.permutation(len(self.lengths)), self.steps_of_pass)
        mixed: list[Indices] = []
        for begin in range(0, len(batches), self.pool):
            pool = batches[begin : begin + self.pool]
            drawn = np.concatenate(pool)
            by_length = drawn[np.argsort(self.lengths[drawn], kind="stable")]
            sizes = np.array([len(g) for batch in pool for g in self._groups(batch)])
            positions = rng.permutation(len(sizes))
            groups = np.split(by_length, np.cumsum(sizes[positions])[:-1])
            dealt = dict(zip(positions.tolist(), groups, strict=True))
            in_order = np.concatenate([dealt[position] for position in range(len(sizes))])
            mixed += np.split(in_order, np.cumsum([len(b) for b in pool])[:-1])
        self._latest.clear()
        self._latest[number] = [mixed[i] for i in rng.permutation(len(mixed))]
        return self._latest[number]
