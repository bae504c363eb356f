"""What of a teacher's signals is kept for a token and for a row, and computing it: the records of `signal_store`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.data.labelled.features import Encoded
from kdcli.errors import MachineError
from kdcli.training.memory import is_out_of_memory
from kdcli.types import Needs, Signals

AT_ONCE = 8192
"""Tokens, padding included, that the teacher reads at once."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """Where a signal lies in the record of a token: columns `begin` … `end`, seen as `shape`, (A, K) or (D,)."""

    kind: str
    layer: int
    shape: tuple[int, ...]
    begin: int
    end: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """What is kept of each token and of each row.

    Attributes:
        parts: of the record of a token.
        logits: shape of those of a row or of a token; None where none are kept.
        logits_of_tokens: whether a token has logits, or a row.
    """

    parts: tuple[Part, ...]
    logits: tuple[int, ...] | None
    logits_of_tokens: bool

    @property
    def width(self) -> int:
        """Values in the record of a token."""
        return self.parts[-1].end if self.parts else 0

    def tokens_shape(self, rows: Encoded) -> tuple[int, int]:
        """Shape of the records of all tokens."""
        return len(rows.ids_T), self.width

    def logits_shape(self, rows: Encoded) -> tuple[int, ...]:
        """Shape of all logits."""
        return (0,) if self.logits is None else (len(rows.ids_T if self.logits_of_tokens else rows.ends), *self.logits)

    def size(self, rows: Encoded) -> int:
        """Bytes that everything takes, two a value of a record and four a logit."""
        return 2 * math.prod(self.tokens_shape(rows)) + 4 * math.prod(self.logits_shape(rows))


def _run(teacher: nn.Module, rows: Encoded, indices: Array, device: torch.device) -> tuple[Signals, Tensor]:
    """What the teacher makes of rows, and which tokens of the batch are real, [B, L] bool."""
    teacher.eval()
    batch = {name: tensor.to(device) for name, tensor in rows.batch(indices).items()}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        signals: Signals = teacher(batch)
    return signals, batch["attention_mask"].bool()


def _joined(kind: str, x: Tensor) -> Tensor:
    """A signal with the values of a token beside each other, [B, L, …]."""
    return x if kind == "hidden" else x.transpose(1, 2).flatten(2)


def layout_of(teacher: nn.Module, rows: Encoded, needs: Needs, device: torch.device) -> Layout:
    """What is kept; the teacher reads the shortest row to tell.

    Raises:
        ValueError: masked logits are asked for.
    """
    if needs.masked_logits:
        raise ValueError("which tokens are masked changes from epoch to epoch: their logits cannot be kept")
    found, _ = _run(teacher, rows, np.argmin(rows.lengths, keepdims=True), device)
    parts: list[Part] = []
    for kind in ("hidden", "q", "k", "v"):
        for layer in sorted(getattr(needs, kind)):
            x = getattr(found, kind)[layer]
            shape = tuple(x.shape[2:] if kind == "hidden" else (x.shape[1], x.shape[3]))
            begin = parts[-1].end if parts else 0
            parts.append(Part(kind, layer, shape, begin, begin + math.prod(shape), x.dtype))
    if not needs.logits:
        return Layout(tuple(parts), None, False)
    assert found.logits is not None
    of_tokens = found.logits.dim() == 3
    return Layout(tuple(parts), tuple(found.logits.shape[2 if of_tokens else 1 :]), of_tokens)


def groups(lengths: Array, order: Array) -> Iterator[Array]:
    """Rows, shortest first, in groups that take at most `AT_ONCE` tokens when padded."""
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - begin) * lengths[order[end]] > AT_ONCE:
            yield order[begin:end]
            begin = end


def records(
    teacher: nn.Module, rows: Encoded, indices: Array, layout: Layout, device: torch.device
) -> Iterator[tuple[Array, Array]]:
    """What is kept of a group of rows, in their order: in halves where the memory does not suffice for all.

    Returns:
        Bit patterns of bfloat16 [tokens, width] int16, and logits [rows or tokens, …] float32.

    Raises:
        MachineError: nor for one row.
    """
    try:
        found = _records(teacher, rows, indices, layout, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found = None
    if found is not None:
        yield found
        return
    if len(indices) == 1:
        raise MachineError(
            "out of memory while the teacher reads one row", "lower data.max_length, or use a device with more memory"
        )
    for half in np.array_split(indices, 2):
        yield from records(teacher, rows, half, layout, device)


def _records(
    teacher: nn.Module, rows: Encoded, indices: Array, layout: Layout, device: torch.device
) -> tuple[Array, Array]:
    found, real_BL = _run(teacher, rows, indices, device)
    parts = [_joined(p.kind, getattr(found, p.kind)[p.layer])[real_BL].to(torch.bfloat16) for p in layout.parts]
    tokens = torch.cat(parts, -1) if parts else torch.empty(0, dtype=torch.bfloat16)
    logits = torch.empty(0)
    if layout.logits is not None:
        assert found.logits is not None
        logits = (found.logits[real_BL] if layout.logits_of_tokens else found.logits).float()
    return tokens.view(torch.int16).cpu().numpy(), logits.cpu().numpy()
