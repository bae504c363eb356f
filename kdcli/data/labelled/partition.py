"""Choose labelled rows by a hash of their texts, and divide them into parts.

The hash decides which rows are held out, which rows belong to a subset, and which rows a model was
trained on. The choice is therefore the same for any order and number of rows in a file, and for
every verb. Texts that differ only in case, white space or Unicode composition have the same hash.
The label does not affect it.

A partition has selection rows, which choose among candidates, and verification rows, which score
the chosen one, once. Rows with the same texts are in the same part, so no part learns from another.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kdcli.disk import user_path, write_atomic
from kdcli.errors import UsageError
from kdcli.types import Array, Example, RowHashes, Task

HELD_OUT_SPLIT = "held-out rows"  # Name of the split in reports.
HELD_BACK = 0.1  # Share of the rows that is held out if there is no validation split.
_SEPARATOR = "\x1f"  # White space for `str.split`, so no canonical text contains it.
_BYTES = 8
VERIFICATION = "verification"
GIVEN_SHARE = 1 / 3
"""Maximum share of the training rows that becomes a part whose size the user chose."""
FREE_SHARE = 0.5
"""If a model was trained on more than the rest, no training row is used for its evaluation."""


@dataclass(frozen=True)
class PartSize:
    """How many rows a part should have.

    Attributes:
        rows: The number of rows.
        share: Maximum share of the training rows that is taken for them.
        is_given: Whether the user chose the number. If not, a split is used whole.
    """

    rows: int
    share: float
    is_given: bool = False

    def given(self, rows: int) -> "PartSize":
        """Return the size with a number of rows of a recipe, which is the default's or chosen."""
        return self if rows == self.rows else PartSize(rows, GIVEN_SHARE, is_given=True)

    def of_split(self, split: "_Drawn") -> RowHashes:
        """Return the rows of a validation or test split that is not divided."""
        return split.take(min(self.rows, len(split)) if self.is_given else len(split))

    def most(self, train: RowHashes) -> int:
        """Return how many training rows the share allows."""
        return int(self.share * len(train))


SELECTION_SIZE, VERIFICATION_SIZE = PartSize(2000, 0.1), PartSize(5000, 0.2)
"""The sizes by default."""


@dataclass(frozen=True)
class Partition:
    """The selection and verification rows. All other rows are training rows.

    Attributes:
        selection: Sorted hashes of the selection rows, see `deciding_hashes`.
        verification: Sorted hashes of the verification rows.
    """

    selection: RowHashes
    verification: RowHashes

    def is_training(self, hashes: RowHashes) -> Array:
        """Whether each row is in neither part, [rows] bool."""
        return ~np.isin(hashes, np.union1d(self.selection, self.verification))

    def is_evaluated(self, hashes: RowHashes, split: str) -> Array:
        """Whether each row is in the verification set if `split` is `verification`, or in the
        selection set if it is `validation`, [rows] bool.

        Raises:
            UsageError: `split` is another one, which a partition does not have.
        """
        if split not in ("validation", VERIFICATION):
            raise UsageError(
                f"data.partition has no {split} split",
                "set data.split to verification, or to validation for the selection rows",
            )
        return np.isin(hashes, self.verification if split == VERIFICATION else self.selection)

    def evaluated_rows(self, splits: Sequence[RowHashes], split: str, rows: str) -> list[Array]:
        """Choose the rows of several splits that are evaluated, [rows] bool for each.

        A row that is in several splits is taken from the last one.

        Args:
            splits: The hashes of the rows of each split.
            split: See `is_evaluated`.
            rows: The word for a row in the error, such as `query`.

        Raises:
            UsageError: No split has such a row.
        """
        chosen = []
        for number, hashes in enumerate(splits):
            later = np.concatenate([hashes[:0], *splits[number + 1 :]])
            chosen.append(self.is_evaluated(hashes, split) & ~np.isin(hashes, later))
        if not np.concatenate(chosen).any():
            raise UsageError(
                f"data.partition names no {split} {rows} of this data",
                "give the data for which kdcli compress wrote the file",
            )
        return chosen

    def write(self, file: Path) -> None:
        """Write the hashes as safetensors. Raises MachineError if that fails."""
        write_atomic(file, save({"selection": self.selection, "verification": self.verification}))

    @classmethod
    def read(cls, source: str) -> "Partition":
        """Read a file that `write` wrote. Raises UsageError if there is no such file."""
        file = user_path(source)
        try:
            tensors = load(file.read_bytes())
            parts = tensors["selection"], tensors["verification"]
            if any(part.dtype != np.uint64 or part.ndim != 1 for part in parts):
                raise ValueError("it must hold lists of 64-bit hashes")
            return cls(*parts)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UsageError(
                f"data.partition={source} cannot be read: {error}",
                "give the partition.safetensors of a run of kdcli compress",
            ) from None


def text_hashes(texts: Sequence[str]) -> RowHashes:
    """Return the hash of each text that is a row of its own, [rows] uint64."""
    return np.fromiter((_hash(_canonical((text,))) for text in texts), np.uint64, len(texts))


def _no_rows() -> RowHashes:
    return np.empty(0, np.uint64)


@dataclass(frozen=True)
class Pools:
    """The hashes of all rows of each split, with duplicates. Missing splits are empty.

    Attributes:
        train, validation, test: The rows of each split.
        known: The rows that trained one of the models.
    """

    train: RowHashes = field(default_factory=_no_rows)
    validation: RowHashes = field(default_factory=_no_rows)
    test: RowHashes = field(default_factory=_no_rows)
    known: RowHashes = field(default_factory=_no_rows)

    @property
    def count(self) -> int:
        """The number of rows of all splits."""
        return len(self.train) + len(self.validation) + len(self.test)

    @property
    def untrained(self) -> int:
        """The number of rows of all splits that trained none of the models."""
        every = np.concatenate([self.train, self.validation, self.test])
        return int((~np.isin(every, self.known)).sum())

    def count_in(self, part: RowHashes) -> int:
        """Return the number of rows that a part of a partition evaluates.

        Duplicates are counted. A row in several splits counts only in the last of them.
        """
        count, later = 0, _no_rows()
        for rows in (self.test, self.validation, self.train):
            count += int((np.isin(rows, part) & ~np.isin(rows, later)).sum())
            later = np.concatenate([later, rows])
        return count


class DividedRows(Protocol):
    """The rows of all splits, which a partition divides."""

    def pools(self, trained: RowHashes) -> Pools:
        """Return the hashes of the rows of each split.

        Args:
            trained: Hashes of the rows that trained one of the models.
        """

    def training_texts(self, partition: Partition) -> Iterable[str]:
        """Return every different text of the training rows."""

    def notes(self) -> list[str]:
        """Return notes on the rows, such as the number of repeated texts."""
        return []


def choose_partition(
    pools: Pools,
    *,
    selection: PartSize,
    verification: PartSize,
    seed: int,
) -> Partition:
    """Choose the selection and verification rows.

    A test split is the verification set. Without it, the validation split is, and training rows are
    added up to the size of this part. Selection rows come from a validation split that is not
    needed for verification, else from the training rows. No row is chosen that trained one of the
    models. If they know most of the training rows, or selection may take fewer of these than half
    of the validation split, the validation split is divided between both parts.

    Args:
        pools: The rows of each split.
        selection: The size of the selection part.
        verification: The size of the verification part.
        seed: Seed that selects rows.
    """
    known = pools.known
    test = _Drawn(pools.test, known, seed)
    validation = _Drawn(pools.validation, np.union1d(known, pools.test), seed)
    others = np.concatenate([known, pools.test, pools.validation])
    train = _Drawn(pools.train, others, seed)
    most_selected, most_verified = (part.most(pools.train) for part in (selection, verification))
    if len(test):
        verified = verification.of_split(test)
        if len(validation):
            return Partition(selection.of_split(validation), verified)
        return Partition(train.take(min(selection.rows, most_selected)), verified)
    half = len(validation) // 2
    is_large = len(validation) >= selection.rows + verification.rows
    is_known = len(train) < FREE_SHARE * len(pools.train)
    if len(validation) and (is_large or is_known or most_selected < half):
        selected = validation.take(min(selection.rows, half))
        return Partition(selected, validation.take(verification.rows))
    if len(validation):
        verified = verification.of_split(validation)
        missing = max(0, min(verification.rows - len(pools.validation), most_verified))
        verified = np.union1d(verified, train.take(missing))
        return Partition(train.take(min(selection.rows, most_selected)), verified)
    free = len(train)
    verified = train.take(min(verification.rows, most_verified, 2 * free // 3))
    return Partition(train.take(min(selection.rows, most_selected, free // 3)), verified)


class _Drawn:
    """Draws rows of a split without replacement, in the order of a hash that depends on a seed."""

    def __init__(self, rows: RowHashes, excluded: RowHashes, seed: int) -> None:
        unique, counts = np.unique(rows[~np.isin(rows, excluded)], return_counts=True)
        order = np.argsort(_mixed(unique, seed), kind="stable")
        self._rows, self._counts = unique[order], counts[order]

    def __len__(self) -> int:
        return int(self._counts.sum())

    def take(self, count: int) -> RowHashes:
        """Return the sorted hashes of about `count` more rows, as rows with one hash stay together.

        A group of rows that does not fit is skipped. If no group fits, the smallest one is taken,
        unless it is the last one.
        """
        taken = np.zeros(len(self._rows), bool)
        room = count
        for n, size in enumerate(self._counts.tolist()):
            if size <= room:
                taken[n] = True
                room -= size
            if not room:
                break
        if 0 < count == room and len(taken) > 1:
            taken[np.argmin(self._counts)] = True
        drawn = self._rows[taken]
        self._rows, self._counts = self._rows[~taken], self._counts[~taken]
        return np.sort(drawn)


def _mixed(hashes: RowHashes, seed: int) -> Array:
    """Mix a seed into hashes (the finaliser of SplitMix64), so that seeds give other orders."""
    mixed: Array = hashes + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def hashes_of(examples: Sequence[Example]) -> RowHashes:
    """Return the hash of each row, [rows] uint64."""
    return np.fromiter((_hash(_canonical(e.texts)) for e in examples), np.uint64, len(examples))


def text_groups(examples: Sequence[Example]) -> NDArray[np.int64] | None:
    """Return the number of each row's text, [rows] int64; None if no text is repeated."""
    texts, groups = np.unique(hashes_of(examples), return_inverse=True)
    return None if len(texts) == len(examples) else groups


def held_back(task: Task, examples: Sequence[Example], seed: int) -> NDArray[np.bool_]:
    """Choose the rows to hold out, [rows] bool.

    Only the context decides for `span` tasks, and only the first text for `text` tasks. All
    questions about a passage are thus in the same part.
    """
    hashes = deciding_hashes(task, examples, seed.to_bytes(_BYTES, "big"))
    return hashes < np.uint64(HELD_BACK * 2**64)


def deciding_hashes(task: Task, examples: Sequence[Example], salt: bytes = b"") -> RowHashes:
    """Return the hash that decides about each row's part, [rows] uint64; see `held_back`."""
    deciding = {"span": slice(1, None), "text": slice(1)}.get(task.kind, slice(None))
    texts = (e.texts[deciding] for e in examples)
    return np.fromiter((_hash(_canonical(t), salt) for t in texts), np.uint64, len(examples))


def choose_subset(examples: Sequence[Example], count: int | None) -> list[Example]:
    """Return the `count` rows with the smallest hashes, in their original order.

    A larger subset contains every smaller one.
    """
    if count is None or count >= len(examples):
        return list(examples)
    hashes = hashes_of(examples).tolist()
    # Rows with the same hash may have different labels.
    by_hash = sorted(
        range(len(examples)), key=lambda i: (hashes[i], examples[i].texts, repr(examples[i].label))
    )
    return [examples[i] for i in sorted(by_hash[:count])]


def _canonical(texts: Sequence[str]) -> str:
    joined = _SEPARATOR.join(" ".join(text.split()) for text in texts)
    return joined.lower() if joined.isascii() else _composed(_composed(joined).casefold())


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _hash(text: str, salt: bytes = b"") -> int:
    return int.from_bytes(
        blake2b(text.encode("utf-8"), digest_size=_BYTES, salt=salt).digest(), "big"
    )
