"""A cache for a teacher's signals on disk, so that the teacher runs only once for every row.

A store is a directory with three files:

* `tokens.bin` has one bfloat16 record per real token, with its hidden states, queries, keys and
  values side by side.
* `logits.bin` has one float32 record per row, or per token if the head labels tokens. For an
  embedding model, it has the vector of every row, in float16 if the vectors have length 1.
* `index.json` has a hash of every block of these files.

Rows are sorted by length, so a batch of rows of similar length reads one region. The files consist
of shards, which the processes of a run divide among themselves. Each process writes its shards into
the files of its directory. Processes whose directories are different, as on machines without a
common one, then send each other what they lack. Groups of rows do not depend on the number of
processes, so the bits do not either. A killed run leaves its complete shards for the next one.

Reading a row always returns the same bits, whatever the batch. Compared with a float32 teacher, the
relative error of a value is at most 1/256. Logits are exact.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from torch import Tensor, nn

from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.sources import LOG_SECONDS
from kdcli.disk import cache_key, disk_errors, fsync, remove, use_entry, write_atomic
from kdcli.engine.session import Session
from kdcli.errors import MachineError, is_out_of_memory
from kdcli.messages import log
from kdcli.types import Array, Batch, Needs, Signals

CACHE_FORMAT = 1  # incremented when the format of the cached files changes
TOKENS_FILE, LOGITS_FILE, INDEX_FILE = "tokens.bin", "logits.bin", "index.json"
TOKENS_KEY, LOGITS_KEY = "teacher.tokens", "teacher.logits"  # keys of a batch
HASHED_BYTES = 1 << 24  # size of a hashed block
RESERVED_BYTES = 1 << 30  # disk space that stays free
UNIT_TOLERANCE = 0.01  # by which bfloat16 changes the length of a normalised vector
SHARDS, MAX_SHARD_GROUPS = 64, 16
"""Shards of a small store, and maximum number of forward passes for a shard of a large one."""
MAX_SHARD_BYTES = 1 << 28  # unless one forward pass makes more
DONE = "shards"  # Directory of a note for each complete shard, with the hashes of its bytes.


class GroupSize(NamedTuple):
    """The maximum size of a forward pass of the teacher.

    Attributes:
        tokens: The number of tokens, including padding.
        rows: The number of rows; None for any number.
    """

    tokens: int
    rows: int | None = None


DEFAULT_GROUPS = GroupSize(8192)


@dataclass(frozen=True)
class StorePlace:
    """A directory where a teacher's signals may be stored, and their maximum size.

    Attributes:
        folder: The directory.
        limit_bytes: The maximum size of a store.
        about: The teacher, for `kdcli cache`. None if the directory is not in the cache.
    """

    folder: Path
    limit_bytes: int
    about: str | None = None


@dataclass(frozen=True)
class Column:
    """The place of a signal in a token's record.

    Attributes:
        kind: `hidden`, `q`, `k` or `v`.
        layer: Number of the layer.
        shape: Shape of the signal of one token, (A, K) or (D,).
        begin: Index of the first value in the record.
        end: Index after the last value.
        dtype: The dtype in which the teacher computes the signal.
    """

    kind: str
    layer: int
    shape: tuple[int, ...]
    begin: int
    end: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RecordLayout:
    """The signals in a store.

    Attributes:
        columns: The columns of a token's record.
        logits: Shape of the logits of one row or token, or of the vector of one row; None if there
            are neither logits nor vectors.
        logits_per_token: Whether there are logits for every token instead of every row.
        pooled: Whether `logits.bin` has the vectors of an embedding model.
        unit: Whether these vectors have length 1.
    """

    columns: tuple[Column, ...]
    logits: tuple[int, ...] | None
    logits_per_token: bool
    pooled: bool = False
    unit: bool = False

    @property
    def dtype(self) -> type[np.generic]:
        """The NumPy dtype of logits or vectors on disk.

        Vectors of any length may be too large or too small for float16.
        """
        return np.float16 if self.unit else np.float32

    @classmethod
    def of(
        cls, teacher: nn.Module, rows: TokenizedRows, needs: Needs, device: torch.device
    ) -> Self:
        """Find the layout by running the teacher on the shortest row.

        Args:
            teacher: batch -> signals.
            rows: The tokenised rows.
            needs: The signals to store.
            device: The device of the teacher.

        Raises:
            ValueError: `needs` includes masked logits, whose tokens change from epoch to epoch.
        """
        if needs.masked_logits:
            raise ValueError(
                "masked logits cannot be cached: the masked tokens change from epoch to epoch"
            )
        signals, _ = _forward(teacher, rows, np.argmin(rows.lengths, keepdims=True), device)
        columns: list[Column] = []
        for kind in ("hidden", "q", "k", "v"):
            for layer in sorted(getattr(needs, kind)):
                x = getattr(signals, kind)[layer]
                shape = tuple(x.shape[2:] if kind == "hidden" else (x.shape[1], x.shape[3]))
                begin = columns[-1].end if columns else 0
                columns.append(Column(kind, layer, shape, begin, begin + math.prod(shape), x.dtype))
        if needs.pooled:
            assert signals.pooled is not None
            lengths = signals.pooled.float().norm(dim=-1)
            unit = bool((lengths - 1).abs().max() < UNIT_TOLERANCE)
            shape = tuple(signals.pooled.shape[1:])
            return cls(tuple(columns), shape, False, pooled=True, unit=unit)
        if not needs.logits:
            return cls(tuple(columns), None, False)
        assert signals.logits is not None
        per_token = signals.logits.dim() == 3
        return cls(tuple(columns), tuple(signals.logits.shape[2 if per_token else 1 :]), per_token)

    def tokens_shape(self, rows: TokenizedRows) -> tuple[int, int]:
        """Return the shape of the array in `tokens.bin`."""
        return len(rows.ids_T), self.columns[-1].end if self.columns else 0

    def logits_shape(self, rows: TokenizedRows) -> tuple[int, ...]:
        """Return the shape of the array in `logits.bin`."""
        if self.logits is None:
            return (0,)
        return len(rows.ids_T if self.logits_per_token else rows.ends), *self.logits

    def record_sizes(self, rows: int, tokens: int) -> dict[str, int]:
        """Return the number of bytes that some rows take in each file."""
        width = self.columns[-1].end if self.columns else 0
        values = 0 if self.logits is None else math.prod(self.logits)
        values *= tokens if self.logits_per_token else rows
        return {
            TOKENS_FILE: 2 * width * tokens,
            LOGITS_FILE: np.dtype(self.dtype).itemsize * values,
        }

    def size(self, rows: TokenizedRows) -> int:
        """Return the number of bytes in a store.

        A value of a token's record takes two bytes, as does a component of a vector of length 1. A
        logit and a component of another vector take four.
        """
        return sum(self.record_sizes(len(rows.ends), len(rows.ids_T)).values())


class Region(NamedTuple):
    """The bytes of a shard in one of the files."""

    begin: int
    size: int


@dataclass(frozen=True)
class StoreShard:
    """A part of a store that one process computes.

    Attributes:
        number: Its position in the store.
        groups: The rows of each forward pass.
        tokens: The number of tokens.
        regions: Its bytes in each file.
    """

    number: int
    groups: Sequence[Array]
    tokens: int
    regions: dict[str, Region]

    @property
    def size(self) -> int:
        """The number of bytes in all files."""
        return sum(region.size for region in self.regions.values())


class SignalStore:
    """Rows with their teacher's signals, as `Examples`. Use `open` to create one.

    Attributes:
        tokens: The records in `tokens.bin`.
        logits: The records in `logits.bin`.
    """

    tokens: Array
    logits: Array

    def __init__(
        self, folder: Path, rows: TokenizedRows, layout: RecordLayout, group_size: GroupSize
    ) -> None:
        self.folder, self.rows, self.layout = folder, rows, layout
        self.group_size = group_size
        self.lengths = lengths = rows.lengths
        self.order = np.argsort(lengths, kind="stable")
        # `position` is the place of each row in the files, and `begins` the place of its first
        # token.
        self.position = np.argsort(self.order)
        self.begins = (np.cumsum(lengths[self.order]) - lengths[self.order])[self.position]

    @classmethod
    def open(
        cls,
        place: StorePlace,
        rows: TokenizedRows,
        teacher: nn.Module,
        needs: Needs,
        fingerprint: str,
        session: Session,
        group_size: GroupSize = DEFAULT_GROUPS,
    ) -> Self | None:
        """Open the store with a teacher's signals, or compute the signals and create it.

        The hashes of an existing store are checked, and a damaged store is computed again. All
        processes of a run open the store together, and each computes a share. If several runs
        open the same store, one computes it and the others wait.

        Args:
            place: The directory of all stores, and the maximum size of this one.
            rows: The tokenised rows.
            teacher: batch -> `Signals`, on `device`. It is put into eval mode.
            needs: The signals to store.
            fingerprint: Hash of everything that the signals depend on, except the rows.
            session: The device of the teacher, and the processes of the run.
            group_size: The size of the teacher's forward passes.

        Returns:
            None if the signals would take more than the maximum size, or leave less than
            `RESERVED_BYTES` of free disk space.

        Raises:
            ValueError: `needs` includes masked logits.
            UsageError: The processes have different teachers or rows.
            MachineError: The disk is full or not writable, or there is not enough memory for a
                single row.
        """
        layout = RecordLayout.of(teacher, rows, needs, session.device)
        if (size := layout.size(rows)) > place.limit_bytes:
            log(
                f"the teacher's signals are not cached: they would take {_mb(size)}, and the "
                f"limit is {_mb(place.limit_bytes)}"
            )
            return None
        key = _key(rows, layout, fingerprint)
        session.agree({"hash of the teacher and the rows of its signals": key})
        store = cls(place.folder / key, rows, layout, group_size)
        if place.about is not None:
            use_entry(store.folder, f"{place.about}, {len(rows):,} rows")
        is_whole = all(session.gather(store._is_whole(key)))
        if not is_whole and not store._create(key, teacher, session):
            return None
        log(f"the teacher's signals are read from {store.folder} ({_mb(size)})")
        store.tokens = store._mapped(TOKENS_FILE, np.int16, layout.tokens_shape(rows))
        store.logits = store._mapped(LOGITS_FILE, layout.dtype, layout.logits_shape(rows))
        return store

    def vectors(self, indices: Array) -> Array:
        """Return the stored vectors or logits of the given rows, [n, ...]."""
        return np.take(self.logits, self.position[indices], axis=0)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Array) -> Batch:
        """Collate the given rows and add the stored records, which `signals` takes out again.

        Returns:
            The rows' tokens; `teacher.tokens` [B, L, width] bfloat16 and `teacher.logits` [B, ...]
            or [B, L, ...] float32, padded with zeros on the right.
        """
        lengths = self.lengths[indices]
        real_BL = np.arange(lengths.max())[None, :] < lengths[:, None]
        # Padding reads record 0, which is then overwritten with zeros.
        at_BL = np.where(real_BL, self.begins[indices][:, None] + np.arange(lengths.max()), 0)

        def padded(records: Array) -> Tensor:
            # `take` is twice as fast as indexing with an array, and as fast as copying every row.
            records_BL = np.take(records, at_BL, axis=0)
            records_BL[~real_BL] = 0
            return torch.from_numpy(records_BL)

        batch = self.rows.batch(indices)
        if self.layout.columns:
            batch[TOKENS_KEY] = padded(self.tokens).view(torch.bfloat16)
        if self.layout.logits_per_token:
            batch[LOGITS_KEY] = padded(self.logits)
        elif self.layout.logits is not None:
            batch[LOGITS_KEY] = torch.from_numpy(self.vectors(indices))
        return batch

    @staticmethod
    def fills(batch: Batch) -> bool:
        """Whether a batch holds a teacher's signals."""
        return TOKENS_KEY in batch or LOGITS_KEY in batch

    def signals(self, batch: Batch) -> Signals:
        """Take the teacher's signals out of a batch.

        Logits are in float32. All other signals have the dtype in which the teacher computes.
        """
        signals = Signals(mask=batch.get("attention_mask"), labels=batch.get("labels"))
        signals.logits = batch.pop(LOGITS_KEY, None)
        tokens = batch.pop(TOKENS_KEY, None)
        for column in self.layout.columns:
            assert tokens is not None, "the batch still has its signals"
            x = (
                tokens[..., column.begin : column.end]
                .to(column.dtype)
                .view(*tokens.shape[:2], *column.shape)
            )
            getattr(signals, column.kind)[column.layer] = (
                x if column.kind == "hidden" else x.transpose(1, 2)
            )
        return signals

    def _mapped(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> Array:
        # An empty file cannot be mapped.
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        return np.memmap(self.folder / name, dtype, mode="r", shape=shape)

    def _is_whole(self, key: str) -> bool:
        """Whether all files exist and match the hashes in the index."""
        try:
            return (self.folder / INDEX_FILE).read_bytes() == _index(self.folder, key)
        except OSError:
            return False

    def _create(self, key: str, teacher: nn.Module, session: Session) -> bool:
        """Create the store, or wait until another run has created it.

        Returns:
            False if there is not enough free disk space.
        """
        folder, rank = self.folder.parent, session.accelerator.process_index
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            leaders = _leaders(folder, key, session)
            with contextlib.ExitStack() as stack:
                if leaders[rank] == rank:
                    stack.enter_context(_held(FileLock(folder / f".{key}.lock")))
                return self._complete(key, teacher, leaders, session)

    def _complete(
        self,
        key: str,
        teacher: nn.Module,
        leaders: Sequence[int],
        session: Session,
    ) -> bool:
        """Compute the missing shards, together with the other processes.

        Args:
            key: The name of the store.
            teacher: batch -> signals.
            leaders: For each process, the first one with the same directory, which holds the lock.
            session: The device and the processes.

        Returns:
            False if there is not enough free disk space.
        """
        rank, size = session.accelerator.process_index, session.accelerator.num_processes
        shards, leads = self._shards(), leaders[rank] == rank
        is_whole = leads and self._is_whole(key)
        done: set[int] | None = set()
        try:
            if is_whole:
                done = {shard.number for shard in shards}
            elif leads:
                done = self._begin(shards)
            states = session.gather(done)
            if None in states:
                return False
            has = {leader: set(states[leader] or ()) for leader in sorted(set(leaders))}
            missing = [
                s for s in shards if all(s.number not in numbers for numbers in has.values())
            ]
            if missing:
                kept = len(shards) - len(missing)
                log(
                    f"computing the teacher's signals for {len(self.rows):,} rows, "
                    f"{_mb(sum(shard.size for shard in missing))}"
                    + (f"; {kept} of {len(shards)} shards are there" if kept else "")
                )
            self._write(missing[rank::size], teacher, session.device)
            for number, shard in enumerate(missing):
                has[leaders[number % size]].add(shard.number)
            session.wait()
            self._exchange(shards, has, rank)
            if leads and not is_whole:
                self._finish(key)
            session.wait()
        finally:
            if leads and not any((self._part / DONE).glob("*")):
                remove(self._part)
        return True

    @property
    def _part(self) -> Path:
        """The directory in which the store is written."""
        return self.folder.parent / f".{self.folder.name}.part"

    def _shards(self) -> list[StoreShard]:
        """Divide the store into shards, which do not depend on the number of processes."""
        groups = list(_groups(self.lengths, self.order, self.group_size))
        group_bytes = self.layout.size(self.rows) // len(groups) + 1
        step = min(MAX_SHARD_GROUPS, len(groups) // SHARDS, MAX_SHARD_BYTES // group_bytes)
        shards = []
        begins = dict.fromkeys((TOKENS_FILE, LOGITS_FILE), 0)
        for number, first in enumerate(range(0, len(groups), max(1, step))):
            of_shard = groups[first : first + max(1, step)]
            tokens = sum(int(self.lengths[indices].sum()) for indices in of_shard)
            sizes = self.layout.record_sizes(sum(map(len, of_shard)), tokens)
            regions = {name: Region(begins[name], size) for name, size in sizes.items()}
            shards.append(StoreShard(number, of_shard, tokens, regions))
            begins = {name: begins[name] + size for name, size in sizes.items()}
        return shards

    def _begin(self, shards: Sequence[StoreShard]) -> set[int] | None:
        """Create the files, or keep the complete shards in them.

        Returns:
            The numbers of the complete shards; None if there is not enough free disk space.
        """
        if self.folder.exists():
            log(f"the teacher's signals in {self.folder} are damaged and will be computed again")
            remove(self.folder)
        done = {shard.number for shard in shards if self._is_done(shard)}
        if not done:
            remove(self._part)
        size, parent = sum(s.size for s in shards if s.number not in done), self.folder.parent
        free = shutil.disk_usage(parent).free
        if size > free - RESERVED_BYTES:
            log(
                f"the teacher's signals are not cached: they would take {_mb(size)}, but {parent} "
                f"has {_mb(free)} of free space, and {_mb(RESERVED_BYTES)} must stay free"
            )
            return None
        if not done:
            (self._part / DONE).mkdir(parents=True)
            for name in (TOKENS_FILE, LOGITS_FILE):
                with (self._part / name).open("wb") as file:
                    file.truncate(sum(shard.regions[name].size for shard in shards))
        return done

    def _is_done(self, shard: StoreShard) -> bool:
        """Whether a killed run wrote a shard completely."""
        try:
            note = (self._part / DONE / str(shard.number)).read_text()
            return note == self._note(shard)
        except OSError:
            return False

    def _note(self, shard: StoreShard) -> str:
        """Return the hashes of a shard's bytes in each file."""
        hashes = []
        for name, (begin, size) in shard.regions.items():
            digest = hashlib.sha256()
            with (self._part / name).open("rb") as file:
                file.seek(begin)
                for left in range(size, 0, -HASHED_BYTES):
                    digest.update(file.read(min(left, HASHED_BYTES)))
            hashes.append(digest.hexdigest())
        return " ".join(hashes)

    def _read(self, shard: StoreShard) -> dict[str, bytes]:
        """Read a shard's bytes from each file."""
        folder = self.folder if self.folder.is_dir() else self._part
        content = {}
        for name, (begin, size) in shard.regions.items():
            with (folder / name).open("rb") as file:
                file.seek(begin)
                content[name] = file.read(size)
        return content

    def _write(
        self,
        shards: Sequence[StoreShard],
        teacher: nn.Module,
        device: torch.device,
    ) -> None:
        """Compute shards, and write each into its place."""
        start = logged = time.monotonic()
        done, total = 0, sum(shard.tokens for shard in shards)
        for shard in shards:
            with self._open_shard(shard) as files:
                for indices in shard.groups:
                    for records in _records(teacher, self.rows, indices, self.layout, device):
                        for file, array in zip(files, records, strict=True):
                            file.write(array.tobytes())
                    done += int(self.lengths[indices].sum())
                    now = time.monotonic()
                    if now - logged > LOG_SECONDS:
                        logged, left = now, (now - start) / done * (total - done)
                        log(f"{done / total:.0%} of the teacher's signals, {left:.0f} s left")

    @contextlib.contextmanager
    def _open_shard(self, shard: StoreShard) -> Iterator[Sequence[IO[bytes]]]:
        """Open both files at a shard's place, and note at the end that the shard is complete."""
        # With a memory map, a full disk would kill the process without an error message.
        with contextlib.ExitStack() as stack:
            files = []
            for name, region in shard.regions.items():
                files.append(stack.enter_context((self._part / name).open("r+b")))
                files[-1].seek(region.begin)
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        write_atomic(self._part / DONE / str(shard.number), self._note(shard))

    def _exchange(self, shards: Sequence[StoreShard], has: dict[int, set[int]], rank: int) -> None:
        """Send every shard to the directories that lack it.

        Args:
            shards: All shards.
            has: The numbers of the shards in each directory, by its leader.
            rank: The number of this process.
        """
        for shard in shards:
            holder = next(leader for leader, numbers in has.items() if shard.number in numbers)
            lacking = [leader for leader, numbers in has.items() if shard.number not in numbers]
            if not lacking:
                continue
            content = self._read(shard) if rank == holder else None
            (content,) = broadcast_object_list([content], from_process=holder)
            if rank in lacking:
                with self._open_shard(shard) as files:
                    for file, name in zip(files, shard.regions, strict=True):
                        file.write(content[name])

    def _finish(self, key: str) -> None:
        """Move the complete store into place."""
        index = _index(self._part, key)
        (self._part / INDEX_FILE).write_bytes(index)
        fsync(self._part / INDEX_FILE)
        self._part.rename(self.folder)
        fsync(self.folder.parent)
        remove(self.folder / DONE)


def _leaders(folder: Path, key: str, session: Session) -> list[int]:
    """Return for each process the first one that sees the same directory."""
    size, rank = session.accelerator.num_processes, session.accelerator.process_index
    if size == 1:
        return [0]
    # The name was never looked up before, so no file system answers from what it remembers.
    (run, *_) = session.gather(uuid.uuid4().hex)
    own, *names = (folder / f".{key}.{run}.{n}" for n in (rank, *range(size)))
    own.touch()
    session.wait()
    leaders = session.gather(next(n for n, name in enumerate(names) if name.exists()))
    own.unlink()
    return leaders


@contextlib.contextmanager
def _held(lock: FileLock) -> Iterator[None]:
    """Hold a lock, after a log line if another run holds it."""
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        log("another process is computing the same signals: waiting for it")
        held = lock.acquire()
    with held:
        yield


def _key(rows: TokenizedRows, layout: RecordLayout, fingerprint: str) -> str:
    """Return the name of a store, which identifies the teacher, the rows and the signals."""
    pad_id, arrays = hashes_of_tokens(rows)
    return cache_key(CACHE_FORMAT, fingerprint, repr(layout), pad_id, arrays)


def hashes_of_tokens(rows: TokenizedRows) -> tuple[int, list[object]]:
    """Return JSON values that identify what a model reads in rows."""

    def described(array: Array) -> list[object]:
        digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        return [str(array.dtype), array.shape, digest]

    arrays = (rows.ids_T, rows.types_T, rows.ends)
    return rows.pad_id, [None if array is None else described(array) for array in arrays]


def _index(folder: Path, key: str) -> bytes:
    """Build the index of the files in a directory, with a hash of every block."""

    def digest(path: Path, begin: int) -> str:
        with path.open("rb") as file:
            file.seek(begin)
            return hashlib.sha256(file.read(HASHED_BYTES)).hexdigest()

    paths = (folder / TOKENS_FILE, folder / LOGITS_FILE)
    blocks = [
        (path, begin) for path in paths for begin in range(0, path.stat().st_size, HASHED_BYTES)
    ]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(lambda block: digest(*block), blocks))
    entries = [
        [path.name, begin, value] for (path, begin), value in zip(blocks, hashes, strict=True)
    ]
    return json.dumps({"format": CACHE_FORMAT, "key": key, "blocks": entries}, indent=1).encode()


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _groups(lengths: Array, order: Array, size: GroupSize) -> Iterator[Array]:
    """Split the rows, in order, into groups for the teacher's forward passes."""
    begin, most = 0, size.rows or len(order)
    for end in range(1, len(order) + 1):
        is_full = end == len(order) or end - begin == most
        if is_full or (end + 1 - begin) * lengths[order[end]] > size.tokens:
            yield order[begin:end]
            begin = end


def _forward(
    teacher: nn.Module, rows: TokenizedRows, indices: Array, device: torch.device
) -> tuple[Signals, Tensor]:
    """Compute the teacher's signals for rows, and the mask of real tokens, [B, L] bool."""
    teacher.eval()
    batch = {name: tensor.to(device) for name, tensor in rows.batch(indices).items()}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        signals: Signals = teacher(batch)
    return signals, batch["attention_mask"].bool()


def _records(
    teacher: nn.Module,
    rows: TokenizedRows,
    indices: Array,
    layout: RecordLayout,
    device: torch.device,
) -> Iterator[tuple[Array, Array]]:
    """Compute the records of a group of rows. If memory runs out, the group is halved.

    Returns:
        For each part of the group, in order: the token records, [tokens, width] int16 with the bits
        of bfloat16; and the logits, [rows or tokens, ...], or the vectors, [rows, E], in the
        dtype of the layout.

    Raises:
        MachineError: There is not enough memory for a single row.
    """
    try:
        computed = _compute(teacher, rows, indices, layout, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        computed = None
    if computed is not None:
        yield computed
    elif len(indices) == 1:
        raise MachineError(
            "out of memory while the teacher reads one row",
            "lower data.max_length, or use a device with more memory",
        )
    else:
        for half in np.array_split(indices, 2):
            yield from _records(teacher, rows, half, layout, device)


def _compute(
    teacher: nn.Module,
    rows: TokenizedRows,
    indices: Array,
    layout: RecordLayout,
    device: torch.device,
) -> tuple[Array, Array]:
    signals, real_BL = _forward(teacher, rows, indices, device)
    columns = []
    for column in layout.columns:
        x = getattr(signals, column.kind)[column.layer]
        x_BLD = x if column.kind == "hidden" else x.transpose(1, 2).flatten(2)
        columns.append(x_BLD[real_BL].to(torch.bfloat16))
    tokens = torch.cat(columns, -1) if columns else torch.empty(0, dtype=torch.bfloat16)
    logits = torch.empty(0)
    if layout.logits is not None:
        outputs = signals.pooled if layout.pooled else signals.logits
        assert outputs is not None
        logits = outputs[real_BL] if layout.logits_per_token else outputs
        logits = logits.half() if layout.unit else logits.float()
    return tokens.view(torch.int16).cpu().numpy(), logits.cpu().numpy()
