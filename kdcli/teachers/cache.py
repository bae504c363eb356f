"""A teacher's signals for rows that are read in every epoch, kept on disk: the teacher then runs once.

Two files and an index. `tokens.bin` holds bfloat16, a record for each real token of all hidden states, queries, keys
and values of that token beside each other; `logits.bin` float32, a record a row, or a token where the head labels
tokens. Rows lie by length, as they were computed, so that writing is appending and a batch of rows of similar length
reads what lies close together; `index.json` holds a hash of every block.

A row has the same bits whichever batch it is read in, in every epoch and after a resumption. Beside a teacher that runs
in float32 they are rounded, by at most 1/256 of a value and by 0.17 % of a signal's norm; logits are not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from kdcli.data.labelled.features import Encoded
from kdcli.disk import disk_errors
from kdcli.teachers.cache_records import Array, Layout, groups, layout_of, records
from kdcli.types import Batch, Examples, Needs, Signals

FORMAT = 1
"""Raised when the cached files change their meaning."""

TOKENS, LOGITS, INDEX = "tokens.bin", "logits.bin", "index.json"
HIDDEN_KEY, LOGITS_KEY = "teacher.tokens", "teacher.logits"

BLOCK = 1 << 24
"""Bytes under one hash."""

MARGIN = 1 << 30
"""Bytes of the disk that are left to others."""

SAY_EVERY = 10.0
"""Seconds between words of progress."""


def size_of(teacher: nn.Module, rows: Encoded, *, needs: Needs, device: torch.device) -> int:
    """Bytes that a store of a teacher's signals would take; the teacher reads the shortest row to tell their widths.

    Args and errors as of `SignalStore.open`.
    """
    return layout_of(teacher, rows, needs, device).size(rows)


class SignalStore:
    """See the module; `open` makes one."""

    def __init__(self, folder: Path, rows: Encoded, layout: Layout) -> None:
        self.folder, self.rows, self.layout = folder, rows, layout
        self.lengths = lengths = rows.lengths
        self.order = np.argsort(lengths, kind="stable")
        self.place = np.argsort(self.order)
        """Of each row, which it is in the files."""
        self.begins = (np.cumsum(lengths[self.order]) - lengths[self.order])[self.place]
        """Of each row, where its tokens begin in the files."""

    @classmethod
    def open(
        cls,
        folder: Path,
        rows: Encoded,
        teacher: nn.Module,
        *,
        needs: Needs,
        fingerprint: str,
        device: torch.device,
        limit_bytes: int,
        log: Callable[[str], None],
    ) -> SignalStore | None:
        """Find the signals of a teacher for rows, or compute them.

        What is found is read once to check its hashes, 2 to 3 seconds a GB and core. A store that was damaged or whose
        making was killed is made anew. Several processes may open the same one: one makes it, the others wait.

        Args:
            folder: holds the stores, a directory each.
            rows: at least one.
            teacher: batch → `Signals`, on `device`: a `kdcli.models.capture.Capture`, or a module that averages
                several; put into eval mode.
            needs: which of its signals are kept; without masked_logits, whose tokens change from epoch to epoch.
            fingerprint: tells this teacher from any other: the hash of weights and configuration.
            limit_bytes: what the store may take.
            log: told what takes long, and why there is no store.

        Returns:
            None where it would take more than `limit_bytes`, or than the disk has free but for a GB.

        Raises:
            MachineError: the disk became full or cannot be written, nothing half-written is left; or the memory does
                not suffice for one row.
        """
        layout = layout_of(teacher, rows, needs, device)
        size = layout.size(rows)
        if size > limit_bytes:
            log(
                f"the teacher's signals are not cached: they would take {_size(size)}, allowed are {_size(limit_bytes)}"
            )
            return None
        key = _key(rows, layout, fingerprint)
        store = cls(folder / key, rows, layout)
        if not store._is_whole(key):
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                with _alone(folder / f".{key}.lock", log):
                    if not store._is_whole(key) and not store._make(key, teacher, device, log):
                        return None
        log(f"the teacher's signals are read from {store.folder}, {_size(size)}")
        store._map()
        return store

    def examples(self) -> Examples:
        """The rows, whose batches hold the teacher's signals too, for `signals` to take out again."""
        return _WithSignals(self)

    def read(self, indices: Array) -> Batch:
        """The teacher's signals of rows, padded on the right with zeros to the longest.

        Returns:
            `teacher.tokens` [B, L, values of a token] bfloat16, and `teacher.logits` [B, …] or [B, L, …] float32.
        """
        lengths = self.lengths[indices]
        real_BL = np.arange(lengths.max())[None, :] < lengths[:, None]
        # Past the end of a row any record will do: it is overwritten.
        at_BL = np.where(real_BL, self.begins[indices][:, None] + np.arange(lengths.max()), 0)

        def padded(records: Array) -> Tensor:
            # Twice as fast as indexing with an array, and no slower than copying row by row.
            found = np.take(records, at_BL, axis=0)
            found[~real_BL] = 0
            return torch.from_numpy(found)

        batch: Batch = {}
        if self.layout.parts:
            batch[HIDDEN_KEY] = padded(self.tokens).view(torch.bfloat16)
        if self.layout.logits_of_tokens:
            batch[LOGITS_KEY] = padded(self.logits)
        elif self.layout.logits is not None:
            batch[LOGITS_KEY] = torch.from_numpy(np.take(self.logits, self.place[indices], axis=0))
        return batch

    @staticmethod
    def fills(batch: Batch) -> bool:
        """Whether a batch is one of `examples`, and still holds the teacher's signals."""
        return HIDDEN_KEY in batch or LOGITS_KEY in batch

    def signals(self, batch: Batch) -> Signals:
        """Take the teacher's signals out of a batch of `examples`, which then holds what it would without a store.

        Returns:
            The signals with the batch's mask and labels; in the number format the teacher computes in, logits float32.
        """
        found = Signals(mask=batch.get("attention_mask"), labels=batch.get("labels"))
        found.logits = batch.pop(LOGITS_KEY, None)
        tokens = batch.pop(HIDDEN_KEY, None)
        for part in self.layout.parts:
            assert tokens is not None, "a batch of examples() still has its signals"
            x = tokens[..., part.begin : part.end].to(part.dtype).view(*tokens.shape[:2], *part.shape)
            getattr(found, part.kind)[part.layer] = x if part.kind == "hidden" else x.transpose(1, 2)
        return found

    def _map(self) -> None:
        def mapped(name: str, dtype: type[Any], shape: tuple[int, ...]) -> Array:
            # A map of nothing is an error.
            empty = math.prod(shape) == 0
            return np.empty(shape, dtype) if empty else np.memmap(self.folder / name, dtype, mode="r", shape=shape)

        self.tokens = mapped(TOKENS, np.int16, self.layout.tokens_shape(self.rows))
        self.logits = mapped(LOGITS, np.float32, self.layout.logits_shape(self.rows))

    def _is_whole(self, key: str) -> bool:
        """Whether the files are there and every block is as it was written; the index too is compared in full."""
        try:
            index = (self.folder / INDEX).read_bytes()
            return index == _index(self.folder, key)
        except OSError:
            return False

    def _make(self, key: str, teacher: nn.Module, device: torch.device, log: Callable[[str], None]) -> bool:
        """Compute everything in a directory aside and rename it; False when the disk has no room.

        Only ever one process does so at a time, so that what is aside before was left by one that was killed.
        """
        aside = self.folder.with_name(f".{key}.part")
        if self.folder.exists():
            log(f"the teacher's signals in {self.folder} are damaged: they are made anew")
        for old in (self.folder, aside):
            if old.exists():
                shutil.rmtree(old)
        size, free = self.layout.size(self.rows), shutil.disk_usage(self.folder.parent).free
        if size > free - MARGIN:
            log(
                f"the teacher's signals are not cached: they would take {_size(size)}, and {self.folder.parent} has "
                f"{_size(free)} free, of which {_size(MARGIN)} stay so"
            )
            return False
        log(f"computing the teacher's signals for {len(self.rows):,} rows, {_size(size)}")
        try:
            aside.mkdir()
            self._write(aside, teacher, device, log)
            with (aside / INDEX).open("wb") as file:
                file.write(_index(aside, key))
                _sync(file)
            aside.rename(self.folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return True

    def _write(self, aside: Path, teacher: nn.Module, device: torch.device, log: Callable[[str], None]) -> None:
        began = said = time.monotonic()
        done, total = 0, len(self.rows.ids_T)
        # Not through a map: where the disk is full, that ends the process without a word.
        with (aside / TOKENS).open("wb") as tokens, (aside / LOGITS).open("wb") as logits:
            for indices in groups(self.lengths, self.order):
                for of_tokens, of_logits in records(teacher, self.rows, indices, self.layout, device):
                    tokens.write(of_tokens.tobytes())
                    logits.write(of_logits.tobytes())
                done += int(self.lengths[indices].sum())
                now = time.monotonic()
                if now - said > SAY_EVERY:
                    said, left = now, (now - began) / done * (total - done)
                    log(f"{done:,} of {total:,} tokens, {left:.0f} s left")
            for file in (tokens, logits):
                _sync(file)


@dataclass(frozen=True)
class _WithSignals:
    """Rows with their teacher's signals; an `Examples` of `kdcli.types`."""

    store: SignalStore

    def __len__(self) -> int:
        return len(self.store.rows)

    def batch(self, indices: Array) -> Batch:
        return self.store.rows.batch(indices) | self.store.read(indices)


def _key(rows: Encoded, layout: Layout, fingerprint: str) -> str:
    """The name of a store: the same for the same teacher, rows and signals only."""
    digest = hashlib.sha256(json.dumps([FORMAT, fingerprint, repr(layout), rows.pad_id]).encode())
    for array in (rows.ids_T, rows.types_T, rows.ends):
        # With its length, so that no two lists of arrays look alike one after another.
        digest.update(b"none" if array is None else f"{array.dtype} {array.shape}".encode())
        digest.update(b"" if array is None else array.tobytes())
    return digest.hexdigest()[:24]


def _index(folder: Path, key: str) -> bytes:
    """What the index of a directory has to say: the hash of every block of its files."""

    def digest(path: Path, begin: int) -> str:
        with path.open("rb") as file:
            file.seek(begin)
            return hashlib.sha256(file.read(BLOCK)).hexdigest()

    blocks = [(folder / name, begin) for name in (TOKENS, LOGITS) for begin in _begins(folder / name)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(lambda block: digest(*block), blocks))
    found = [[path.name, begin, of_block] for (path, begin), of_block in zip(blocks, hashes, strict=True)]
    return json.dumps({"format": FORMAT, "key": key, "blocks": found}, indent=1).encode()


def _begins(path: Path) -> range:
    return range(0, path.stat().st_size, BLOCK)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _alone(lock: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock, which the system takes back from a process that was killed."""
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        log("another process computes the same signals of the teacher: waiting for it")
        held.acquire()
    try:
        yield
    finally:
        held.release()


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
