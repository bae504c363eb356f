"""The examples of each step's batch: pure functions of seed and step, so that resuming cannot change them."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


ROUNDS = 8  # Of the Feistel network: three make it pseudo-random (Luby, Rackoff 1988), more hide its small halves.
# Odd numbers of splitmix64 (Steele, Lea, Flood 2014), which mixes the bits of a half.
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class BatchOrder:
    """Shuffled passes over `n` examples in batches of `batch_size`; a batch may straddle two passes. Every example
    comes exactly once in a pass, in an order drawn from (seed, pass). Memory does not depend on `n`."""

    n: int
    batch_size: int
    seed: int

    def indices(self, step: int) -> Indices:
        """The examples of a step (1-based), [batch_size] int64."""
        passes, places = np.divmod(
            np.arange((step - 1) * self.batch_size, step * self.batch_size), self.n
        )
        return np.concatenate(
            [permuted(places[passes == p], self.n, self.seed, int(p)) for p in np.unique(passes)]
        )

    def passes(self, step: int) -> Indices:
        """The pass of each example of a step, from 0, [batch_size] int64."""
        return np.arange((step - 1) * self.batch_size, step * self.batch_size) // self.n


def permuted(places: Indices, n: int, *key: int) -> Indices:
    """What a permutation of `range(n)`, drawn from `key`, has at these places: computed for each of them alone, by a
    Feistel network over the next even number of bits, repeated until it is below `n` (cycle walking)."""
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    found = places.astype(np.uint64)
    todo = np.arange(len(found))
    while len(todo):
        left, right = found[todo] >> half, found[todo] & low
        for one in keys:
            mixed = (right ^ one) * MIX[0]
            mixed = (mixed ^ (mixed >> np.uint64(27))) * MIX[1]
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & low)
        found[todo] = left << half | right
        todo = todo[found[todo] >= n]
    return found.astype(np.int64)


@dataclass(frozen=True)
class BucketOrder:
    """Shuffled passes in batches made of groups of examples of similar length, so that little is padding.

    Every example comes exactly once in a pass. Pools of `pool` batches are drawn at random; each pool is sorted by
    length and cut into groups of `group`; the groups are dealt to the pool's batches at random; the batches of the pass
    are shuffled. A micro-batch of `group` examples is then hardly padded, while a batch mixes lengths: where length
    goes with the label or the source, batches of one length would be biased. Batches differ in size by one example at
    most. With a pool of 1 every batch is random, sorted in itself.
    """

    lengths: Indices
    batch_size: int
    group: int
    seed: int
    pool: int = 64

    @property
    def n(self) -> int:
        """Examples of one pass."""
        return len(self.lengths)

    def passes(self, step: int) -> int:
        """The pass of a step, from 0."""
        return (step - 1) // self.steps_of_pass

    @property
    def steps_of_pass(self) -> int:
        """Batches of one pass."""
        return -(-len(self.lengths) // self.batch_size)

    def indices(self, step: int) -> Indices:
        """The examples of a step (1-based), [batch_size or fewer] int64, group after group."""
        number, place = divmod(step - 1, self.steps_of_pass)
        return self._batches(number)[place]

    def padding(self, number: int = 0) -> float:
        """Share of a pass's tokens that is padding when every group is padded to its own longest example."""
        groups = [g for b in self._batches(number) for g in self._groups(b)]
        padded = sum(len(g) * int(self.lengths[g].max()) for g in groups)
        return 1.0 - float(self.lengths.sum()) / padded

    def _groups(self, batch: Indices) -> list[Indices]:
        return np.array_split(batch, -(-len(batch) // self.group))

    @functools.cached_property
    def _latest(self) -> dict[int, list[Indices]]:
        return {}

    def _batches(self, number: int) -> list[Indices]:
        """The batches of a pass; those of the latest pass are kept."""
        if number in self._latest:
            return self._latest[number]
        rng = np.random.Generator(np.random.PCG64([self.seed, number]))
        # Of nearly equal sizes: a remainder of one or two examples would make a step of noise.
        batches = np.array_split(rng.permutation(len(self.lengths)), self.steps_of_pass)
        mixed: list[Indices] = []
        for begin in range(0, len(batches), self.pool):
            pool = batches[begin : begin + self.pool]
            drawn = np.concatenate(pool)
            by_length = drawn[np.argsort(self.lengths[drawn], kind="stable")]
            sizes = np.array([len(g) for batch in pool for g in self._groups(batch)])
            places = rng.permutation(len(sizes))
            dealt = dict(
                zip(
                    places.tolist(), np.split(by_length, np.cumsum(sizes[places])[:-1]), strict=True
                )
            )
            in_place = np.concatenate([dealt[place] for place in range(len(sizes))])
            mixed += np.split(in_place, np.cumsum([len(b) for b in pool])[:-1])
        self._latest.clear()
        self._latest[number] = [mixed[i] for i in rng.permutation(len(mixed))]
        return self._latest[number]
