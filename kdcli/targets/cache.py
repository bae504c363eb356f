"""A teacher's signals on disk: for rows that are read in every epoch the teacher runs once.

`tokens.bin` holds bfloat16: one record per real token, with its hidden states, queries, keys and
values side by side. `logits.bin` holds float32: one record per row, or per token where the head
labels tokens; of an embedding model, a row's vector in float16. Rows are stored by length,
so computing appends and a batch of similar lengths reads one region. `index.json` holds a hash of
every block.

A row reads the same bits in every batch. Against a float32 teacher a value is off by at most 1/256;
logits are exact.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from kdcli.data.labelled.features import TokenizedRows
from kdcli.disk import atomic_dir, cache_key, disk_errors
from kdcli.engine.memory import is_out_of_memory
from kdcli.errors import MachineError
from kdcli.types import Batch, Needs, Signals

FORMAT = 1  # incremented when the cached files change their meaning
TOKENS_FILE, LOGITS_FILE, INDEX_FILE = "tokens.bin", "logits.bin", "index.json"
TOKENS_KEY, LOGITS_KEY = "teacher.tokens", "teacher.logits"  # of a batch
HASHED_BYTES = 1 << 24  # under one hash
RESERVED_BYTES = 1 << 30  # of the disk, left free
TEACHER_TOKENS = 8192  # padding included, in one forward pass of the teacher
LOG_SECONDS = 10.0

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Column:
    """A signal's place in a token's record: values `begin` to `end`, viewed as `shape`, (A, K) or
    (D,)."""

    kind: str
    layer: int
    shape: tuple[int, ...]
    begin: int
    end: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RecordLayout:
    """What is stored: the columns of a token's record, and the shape of the logits of a row or
    token, or of its vector (`pooled`), if any."""

    columns: tuple[Column, ...]
    logits: tuple[int, ...] | None
    logits_per_token: bool
    pooled: bool = False

    @property
    def dtype(self) -> type[Any]:
        """Of logits or vectors on disk."""
        return np.float16 if self.pooled else np.float32

    @classmethod
    def of(
        cls, teacher: nn.Module, rows: TokenizedRows, needs: Needs, device: torch.device
    ) -> Self:
        """Run the teacher on the shortest row to get the widths. Raises ValueError: masked logits,
        whose tokens change from epoch to epoch."""
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
            return cls(tuple(columns), tuple(signals.pooled.shape[1:]), False, pooled=True)
        if not needs.logits:
            return cls(tuple(columns), None, False)
        assert signals.logits is not None
        per_token = signals.logits.dim() == 3
        return cls(tuple(columns), tuple(signals.logits.shape[2 if per_token else 1 :]), per_token)

    def tokens_shape(self, rows: TokenizedRows) -> tuple[int, int]:
        return len(rows.ids_T), self.columns[-1].end if self.columns else 0

    def logits_shape(self, rows: TokenizedRows) -> tuple[int, ...]:
        return (
            (0,)
            if self.logits is None
            else (len(rows.ids_T if self.logits_per_token else rows.ends), *self.logits)
        )

    def size(self, rows: TokenizedRows) -> int:
        """Bytes of everything: two per value of a record, four per logit, two per component of a
        vector."""
        bytes_each = np.dtype(self.dtype).itemsize
        return 2 * math.prod(self.tokens_shape(rows)) + bytes_each * math.prod(
            self.logits_shape(rows)
        )


class SignalStore:
    """Rows with their teacher's signals, an `Examples`; `open` makes one."""

    tokens: Array
    logits: Array

    def __init__(self, folder: Path, rows: TokenizedRows, layout: RecordLayout) -> None:
        self.folder, self.rows, self.layout = folder, rows, layout
        self.lengths = lengths = rows.lengths
        self.order = np.argsort(lengths, kind="stable")
        # Position of each row in the files, and of its first token.
        self.position = np.argsort(self.order)
        self.begins = (np.cumsum(lengths[self.order]) - lengths[self.order])[self.position]

    @classmethod
    def open(
        cls,
        folder: Path,
        rows: TokenizedRows,
        teacher: nn.Module,
        *,
        needs: Needs,
        fingerprint: str,
        device: torch.device,
        limit_bytes: int,
        log: Callable[[str], None],
    ) -> Self | None:
        """Find a teacher's signals for rows in one of the stores of a directory, or compute them.
        An existing store is read once to check its hashes; a damaged or incomplete one is computed
        again. Of several processes one computes and the others wait. `teacher`: batch -> `Signals`,
        on `device`; put into eval mode. `fingerprint`: hash of its weights and configuration.
        Returns None if it would take more than `limit_bytes`, or more than the free disk less
        `RESERVED_BYTES`. Raises ValueError: see `RecordLayout.of`; MachineError: the disk is full
        or not writable, or out of memory on one row."""
        layout = RecordLayout.of(teacher, rows, needs, device)
        if (size := layout.size(rows)) > limit_bytes:
            log(
                f"the teacher's signals are not cached: they would take {_mb(size)}, allowed are "
                f"{_mb(limit_bytes)}"
            )
            return None
        key = _key(rows, layout, fingerprint)
        store = cls(folder / key, rows, layout)
        if not store._is_whole(key):
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                lock = FileLock(folder / f".{key}.lock")
                try:
                    held = lock.acquire(timeout=0)
                except Timeout:
                    log("another process computes the same signals of the teacher: waiting for it")
                    held = lock.acquire()
                with held:
                    if not store._is_whole(key) and not store._make(key, teacher, device, log):
                        return None
        log(f"the teacher's signals are read from {store.folder}, {_mb(size)}")
        store.tokens = store._mapped(TOKENS_FILE, np.int16, layout.tokens_shape(rows))
        store.logits = store._mapped(LOGITS_FILE, layout.dtype, layout.logits_shape(rows))
        return store

    def vectors(self, indices: Array) -> Array:
        """The stored vectors (or logits) of some rows, [n, ...]."""
        return np.take(self.logits, self.position[indices], axis=0)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Array) -> Batch:
        """The batch of some rows, with the stored records padded on the right with zeros; `signals`
        takes these out. They are `teacher.tokens` [B, L, width] bfloat16, and `teacher.logits` [B,
        ...] or [B, L, ...] float32."""
        lengths = self.lengths[indices]
        real_BL = np.arange(lengths.max())[None, :] < lengths[:, None]
        # Past the end of a row any record will do: it is overwritten.
        at_BL = np.where(real_BL, self.begins[indices][:, None] + np.arange(lengths.max()), 0)

        def padded(records: Array) -> Tensor:
            # Twice as fast as indexing with an array, and no slower than copying row by row.
            taken = np.take(records, at_BL, axis=0)
            taken[~real_BL] = 0
            return torch.from_numpy(taken)

        batch = self.rows.batch(indices)
        if self.layout.columns:
            batch[TOKENS_KEY] = padded(self.tokens).view(torch.bfloat16)
        if self.layout.logits_per_token:
            batch[LOGITS_KEY] = padded(self.logits)
        elif self.layout.logits is not None:
            batch[LOGITS_KEY] = torch.from_numpy(
                np.take(self.logits, self.position[indices], axis=0)
            )
        return batch

    @staticmethod
    def fills(batch: Batch) -> bool:
        """Whether a batch holds a teacher's signals."""
        return TOKENS_KEY in batch or LOGITS_KEY in batch

    def signals(self, batch: Batch) -> Signals:
        """Take the teacher's signals out of a batch, in the dtype the teacher computes in, logits
        in float32."""
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

    def _mapped(self, name: str, dtype: type[Any], shape: tuple[int, ...]) -> Array:
        # An empty file cannot be mapped.
        empty = math.prod(shape) == 0
        return (
            np.empty(shape, dtype)
            if empty
            else np.memmap(self.folder / name, dtype, mode="r", shape=shape)
        )

    def _is_whole(self, key: str) -> bool:
        """Whether the files are there and the index equals the one made of them now."""
        try:
            return (self.folder / INDEX_FILE).read_bytes() == _index(self.folder, key)
        except OSError:
            return False

    def _make(
        self, key: str, teacher: nn.Module, device: torch.device, log: Callable[[str], None]
    ) -> bool:
        """Compute and write everything; False if the disk has no room. The caller holds the
        lock."""
        parent = self.folder.parent
        if self.folder.exists():
            log(f"the teacher's signals in {self.folder} are damaged: they are made anew")
        # Before the room is measured: the damaged store, and what a killed process left.
        for old in (self.folder, parent / f".{key}.part"):
            shutil.rmtree(old, ignore_errors=True)
        size, free = self.layout.size(self.rows), shutil.disk_usage(parent).free
        if size > free - RESERVED_BYTES:
            log(
                f"the teacher's signals are not cached: they would take {_mb(size)}, and {parent} "
                f"has {_mb(free)} "
                f"free, of which {_mb(RESERVED_BYTES)} stay so"
            )
            return False
        log(f"computing the teacher's signals for {len(self.rows):,} rows, {_mb(size)}")
        with atomic_dir(self.folder) as aside:
            self._write(aside, teacher, device, log)
            (aside / INDEX_FILE).write_bytes(_index(aside, key))
        return True

    def _write(
        self, aside: Path, teacher: nn.Module, device: torch.device, log: Callable[[str], None]
    ) -> None:
        began = logged = time.monotonic()
        done, total = 0, len(self.rows.ids_T)
        # Not through a map: a full disk would end the process without a message.
        with (aside / TOKENS_FILE).open("wb") as tokens, (aside / LOGITS_FILE).open("wb") as logits:
            for indices in _groups(self.lengths, self.order):
                for token_records, logit_records in _records(
                    teacher, self.rows, indices, self.layout, device
                ):
                    tokens.write(token_records.tobytes())
                    logits.write(logit_records.tobytes())
                done += int(self.lengths[indices].sum())
                now = time.monotonic()
                if now - logged > LOG_SECONDS:
                    logged, left = now, (now - began) / done * (total - done)
                    log(f"{done:,} of {total:,} tokens, {left:.0f} s left")


def _key(rows: TokenizedRows, layout: RecordLayout, fingerprint: str) -> str:
    """The name of a store, the same only for the same teacher, rows and signals."""
    arrays = [
        None
        if array is None
        else [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
        for array in (rows.ids_T, rows.types_T, rows.ends)
    ]
    return cache_key(FORMAT, fingerprint, repr(layout), rows.pad_id, arrays)


def _index(folder: Path, key: str) -> bytes:
    """The index that the files of a directory should have: a hash of every block."""

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
    listed = [
        [path.name, begin, value] for (path, begin), value in zip(blocks, hashes, strict=True)
    ]
    return json.dumps({"format": FORMAT, "key": key, "blocks": listed}, indent=1).encode()


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _groups(lengths: Array, order: Array) -> Iterator[Array]:
    """Rows in order, in groups of at most `TEACHER_TOKENS` tokens when padded."""
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - begin) * lengths[order[end]] > TEACHER_TOKENS:
            yield order[begin:end]
            begin = end


def _forward(
    teacher: nn.Module, rows: TokenizedRows, indices: Array, device: torch.device
) -> tuple[Signals, Tensor]:
    """The teacher's signals for rows, and which tokens of the batch are real, [B, L] bool."""
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
    """The records of a group of rows, in their order; out of memory halves the group. Returns bit
    patterns of bfloat16 [tokens, width] int16, and logits [rows or tokens, ...] float32."""
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
        found = signals.pooled if layout.pooled else signals.logits
        assert found is not None
        logits = found[real_BL] if layout.logits_per_token else found
        logits = logits.half() if layout.pooled else logits.float()
    return tokens.view(torch.int16).cpu().numpy(), logits.cpu().numpy()
