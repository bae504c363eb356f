"""Choose the distinct texts with the smallest hashes of a source of any size.

The memory depends on the number of chosen texts. Of all other texts, only their 64-bit hashes are
kept, in a temporary file, to count how many are distinct. Two texts with one hash count as one. For
n texts that are not chosen, the probability that the count is wrong is n^2 / 2^65: 3e-8 for a
million and 0.03 for a billion. Which texts are chosen does not depend on it.
"""

import tempfile
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from kdcli.data.accounts import REPEATED, RowAccount
from kdcli.data.rows import hash_of
from kdcli.disk import disk_errors
from kdcli.types import Array

HASHES_IN_MEMORY = 1 << 19
BUCKET_BITS = 10  # Hashes on disk are sorted into this many bits of buckets, which are read apart.
SPARE_ROWS = 1000  # Candidates above the number of chosen texts, before the largest are dropped.


class Unit(NamedTuple):
    """A text as it is read, its place, and its positive and negatives."""

    text: str
    where: str = ""
    role: str = ""
    positive: str | None = None
    negatives: tuple[str, ...] = ()


@dataclass(slots=True)
class Candidate:
    """A text that may be chosen.

    Attributes:
        text: The text.
        hash: Its hash.
        role: The role in which it was read first; see `Texts.roles`.
        where: The place where it was read first.
        position: Its position among the texts that were read; -1 for a positive or a negative.
        positive: A text that should be near; None if there is none.
        negatives: Texts that should be far.
    """

    text: str
    hash: int
    role: str
    where: str
    position: int = -1
    positive: str | None = None
    negatives: tuple[str, ...] = ()


class TextChoice:
    """Chooses texts while they are read.

    Attributes:
        read: The number of texts that were read, without positives and negatives.
        distinct: The number of distinct texts, after `close`.
        cut: The number of distinct texts that were read and not chosen, after `close`.
        first_cut: The place of the first of them.
    """

    def __init__(self, rows: int | None, account: RowAccount, *, paired: bool) -> None:
        """Start a choice.

        Args:
            rows: The maximum number of chosen texts; None for no maximum.
            account: Counts repeated texts. The place of the first one is not known if more than
                `HASHES_IN_MEMORY` texts that are not chosen come before it.
            paired: Whether the texts have positives and negatives.
        """
        self.read = self.distinct = self.cut = 0
        self.first_cut = ""
        self._rows = rows
        self._account = account
        self._paired = paired
        self._candidates: dict[str, Candidate] = {}
        self._limit = 1 << 64  # Texts with this hash or a larger one are not chosen.
        self._cut_read = DistinctHashes()
        self._cut_texts = DistinctHashes() if paired else self._cut_read
        self._first_cut_position: int | None = None
        self._has_repeated = False

    def add(self, unit: Unit) -> None:
        """Take the next text, its positive and its negatives."""
        text, where, role, positive, negatives = unit
        if self._rows is not None and len(self._candidates) > self._rows * 9 // 8 + SPARE_ROWS:
            self._drop_largest()
        candidate = self._candidates.get(text) or self._new_candidate(text, role, where, self.read)
        if candidate is not None:
            if candidate.position < 0:
                candidate.position, candidate.where = self.read, where
            elif candidate.position != self.read:
                self._note_repeated(where)
            if positive is not None:
                candidate.positive, candidate.negatives = positive, negatives
        self.read += 1
        if positive is None:
            return
        for other in (positive, *negatives):
            if other not in self._candidates:
                linked = self._new_candidate(other, "document", where, -1)
                if linked is not None and other == positive:
                    linked.positive = text

    def close(self) -> list[Candidate]:
        """Return the chosen texts in the order of their hashes, and complete the account."""
        chosen = self._drop_largest()
        self._candidates = {}
        self.cut = self._cut_read.count()
        cut_texts = self._cut_texts.count() if self._paired else self.cut
        self.distinct = len(chosen) + cut_texts
        distinct_read = self.cut + sum(one.position >= 0 for one in chosen)
        repeated = self.read - distinct_read - self._has_repeated
        if repeated:
            self._account.leave_out(REPEATED, "", repeated)
        return chosen

    def _new_candidate(self, text: str, role: str, where: str, position: int) -> Candidate | None:
        """Add a text to the candidates; None if its hash is too large."""
        value = hash_of(text)
        if value >= self._limit:
            self._cut_one(value, where, position)
            return None
        candidate = self._candidates[text] = Candidate(text, value, role, where, position)
        return candidate

    def _drop_largest(self) -> list[Candidate]:
        """Keep only as many candidates as are chosen, and return them in the order of hashes."""
        by_hash = sorted(self._candidates.values(), key=attrgetter("hash"))
        if self._rows is None or len(by_hash) <= self._rows:
            return by_hash
        for one in by_hash[self._rows :]:
            del self._candidates[one.text]
            self._cut_one(one.hash, one.where, one.position)
        del by_hash[self._rows :]
        self._limit = by_hash[-1].hash
        return by_hash

    def _cut_one(self, value: int, where: str, position: int) -> None:
        """Count a text that is not chosen."""
        if self._paired:
            self._cut_texts.add(value)
        if position < 0:
            return
        if not self._cut_read.add(value):
            self._note_repeated(where)
        if self._first_cut_position is None or position < self._first_cut_position:
            self._first_cut_position, self.first_cut = position, where

    def _note_repeated(self, where: str) -> None:
        """Count the first repeated text with its place."""
        if not self._has_repeated and not self._cut_read.spilled:
            self._has_repeated = True
            self._account.leave_out(REPEATED, where)


class DistinctHashes:
    """Counts distinct 64-bit hashes: the last ones in memory, the others in sorted runs on disk."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._file: IO[bytes] | None = None
        self._runs: list[Array] = []  # The index in the file at which each bucket of a run begins.
        self._written = 0

    @property
    def spilled(self) -> bool:
        """Whether hashes were written to disk, so that `add` does not know all."""
        return self._file is not None

    def add(self, value: int) -> bool:
        """Add a hash. Returns False if it is among those in memory."""
        if value in self._recent:
            return False
        self._recent.add(value)
        if len(self._recent) >= HASHES_IN_MEMORY:
            self._spill()
        return True

    def count(self) -> int:
        """Return the number of distinct hashes. Nothing can be added afterwards."""
        if self._file is None:
            return len(self._recent)
        self._spill()
        buckets = 1 << BUCKET_BITS
        step = max(1, buckets * HASHES_IN_MEMORY // self._written)
        total = 0
        with self._file as file, disk_errors(Path(tempfile.gettempdir())):
            for first in range(0, buckets, step):
                parts = []
                for begins in self._runs:
                    begin, end = begins[first], begins[min(first + step, buckets)]
                    file.seek(int(begin) * 8)
                    parts.append(np.frombuffer(file.read(int(end - begin) * 8), np.uint64))
                total += len(np.unique(np.concatenate(parts)))
        return total

    def _spill(self) -> None:
        values = np.fromiter(self._recent, np.uint64, len(self._recent))
        values.sort()
        self._recent = set()
        edges = np.arange(1, 1 << BUCKET_BITS, dtype=np.uint64) << np.uint64(64 - BUCKET_BITS)
        inner = np.searchsorted(values, edges)
        self._runs.append(self._written + np.concatenate([[0], inner, [len(values)]]))
        self._written += len(values)
        with disk_errors(Path(tempfile.gettempdir())):
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115
            self._file.write(values.tobytes())
