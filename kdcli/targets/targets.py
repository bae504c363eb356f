"""The signals of a frozen teacher: computed in every step, stored on disk, or read from a
file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.text.sentences import Texts
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.models.card import weights_hash
from kdcli.models.model import Model
from kdcli.targets.cache import SignalStore
from kdcli.targets.teacher import Teacher
from kdcli.types import Batch, Examples, Needs, Signals

Array = np.ndarray[Any, Any]
SIGNALS = "signals"
"""Directory of a run for stored signals, while a stage reads them."""
LOGITS_KEY = "teacher.logits"


@dataclass(frozen=True)
class StorePlace:
    """Where a teacher's signals may be stored, and how many bytes they may take."""

    folder: Path
    limit_bytes: int


class Targets(Protocol):
    """A teacher's signals for the batches of a training."""

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        """Add to the batches of both what `signals` takes out of them."""

    def signals(self, batch: Batch) -> Signals | None:
        """Take the teacher's signals out of a batch, or compute them; None if it has none."""


@dataclass(frozen=True)
class LiveTargets:
    """Signals that the teacher computes in every step."""

    teacher: Teacher

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        return examples, held_out

    def signals(self, batch: Batch) -> Signals | None:
        return self.teacher.signals(batch)


@dataclass(frozen=True)
class StoredTargets:
    """Signals of the training rows from a store; held-out rows are computed by the teacher."""

    store: SignalStore
    teacher: Teacher

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        return self.store, held_out

    def signals(self, batch: Batch) -> Signals | None:
        if self.store.fills(batch):
            return self.store.signals(batch)
        return self.teacher.signals(batch)


@dataclass(frozen=True)
class PrecomputedLogits:
    """Logits of a teacher whose tokens do not matter: it read the rows with its own tokenizer, or
    a file holds its outputs.

    Attributes:
        train_NC: logits of the rows to train on, [N, C].
        held_out_NC: logits of the held-out rows; None if they are unknown.
        key: under which a batch carries the logits.
    """

    train_NC: Array
    held_out_NC: Array | None
    key: str = f"{LOGITS_KEY}.0"

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        train = WithLogits(examples, self.train_NC, self.key)
        if self.held_out_NC is None:
            return train, held_out
        return train, WithLogits(held_out, self.held_out_NC, self.key)

    def signals(self, batch: Batch) -> Signals | None:
        logits = batch.pop(self.key, None)
        if logits is None:
            return None
        return Signals(mask=batch["attention_mask"], labels=batch.get("labels"), logits=logits)


@dataclass(frozen=True)
class WithLogits:
    """Examples with the logits [rows, C] of a teacher in each batch, under `key`."""

    inner: Examples
    logits_NC: Array
    key: str

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Array) -> Batch:
        """The batch of some rows, with their logits."""
        return self.inner.batch(indices) | {self.key: torch.from_numpy(self.logits_NC[indices])}


POOLED, POSITIVE, NEGATIVES = "teacher.pooled", "teacher.positive", "teacher.negatives"
Vectors = Callable[[Array], Array]
"""Numbers of texts -> the teacher's vectors of these texts, [n, E]."""


@dataclass(frozen=True)
class VectorTargets:
    """An embedding teacher's vectors of texts, of their positives and negatives, and of anchors.

    Attributes:
        vectors: gives the vectors of texts by number.
        texts: which texts are positives and negatives of which.
        anchors_RE: vectors of fixed texts, which all batches share.
        live: computes other signals in every step; None if no loss needs any.
    """

    vectors: Vectors
    texts: Texts
    anchors_RE: Tensor
    live: Teacher | None = None

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        parts = [_WithVectors(part, self.vectors, self.texts) for part in (examples, held_out)]
        return parts[0], parts[1]

    def signals(self, batch: Batch) -> Signals | None:
        pooled, positive, negatives = (
            batch.pop(name, None) for name in (POOLED, POSITIVE, NEGATIVES)
        )
        signals = Signals(mask=batch["attention_mask"])
        if self.live is not None:
            signals = self.live.signals(batch)
        anchors = self.anchors_RE.to(batch["input_ids"].device)
        return replace(
            signals, pooled=pooled, positive=positive, negatives=negatives, anchors=anchors
        )


@dataclass(frozen=True)
class _WithVectors:
    """Examples whose `numbers` name texts, with the teacher's vectors in each batch."""

    inner: Any
    vectors: Vectors
    texts: Texts

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Array) -> Batch:
        """The batch of some texts, with `teacher.pooled` [B, E] and, of pairs,
        `teacher.positive` [B, E] and `teacher.negatives` [B, M, E]."""
        batch: Batch = self.inner.batch(indices)
        at, texts = self.inner.numbers[indices], self.texts
        batch[POOLED] = self._vectors(at)
        if texts.paired:
            batch[POSITIVE] = self._vectors(texts.positive[at])
            if texts.negatives.shape[1]:
                flat = self._vectors(texts.negatives[at].reshape(-1))
                batch[NEGATIVES] = flat.view(*texts.negatives[at].shape, -1)
        return batch

    def _vectors(self, at: Array) -> Tensor:
        """Vectors of texts; zeros for number -1."""
        vectors = torch.from_numpy(self.vectors(np.maximum(at, 0)).astype(np.float32))
        return vectors * torch.from_numpy((at >= 0).astype(np.float32))[:, None]


def targets_of(
    teacher: Model,
    rows: Examples,
    needs: Needs,
    session: Session,
    *,
    passes: float = 1.0,
    place: StorePlace | None = None,
) -> Targets:
    """A frozen teacher's signals for rows, stored if training reads them several times.

    The teacher is on the device and in the compute dtype afterwards.

    Args:
        passes: number of times that training reads the rows.
        place: where signals may be stored; None computes them in every step.
    """
    live = Teacher.frozen(teacher.source, teacher.model, needs, session)
    if place is None or passes <= 1 or not isinstance(rows, TokenizedRows):
        return LiveTargets(live)
    fingerprint = weights_hash(teacher.model)
    store = stored_signals(live.captured, rows, needs, fingerprint, place, session)
    return LiveTargets(live) if store is None else StoredTargets(store, live)


def stored_signals(
    captured: nn.Module,
    rows: TokenizedRows,
    needs: Needs,
    fingerprint: str,
    place: StorePlace,
    session: Session,
) -> SignalStore | None:
    """A teacher's signals for rows from a store, which is filled if it is not there.

    Args:
        captured: the frozen teacher, batch -> signals.
        fingerprint: a hash of everything that the signals depend on but the rows.

    Returns:
        None if the signals would take more than the place allows.
    """
    return SignalStore.open(
        place.folder,
        rows,
        captured,
        needs=needs,
        fingerprint=fingerprint,
        device=session.device,
        limit_bytes=place.limit_bytes,
        log=Progress.log,
    )


def anchors_of(vectors: Vectors, numbers: Array, count: int, seed: int) -> Tensor:
    """The vectors of `count` of the texts, drawn by the seed, [R, E] float32."""
    drawn = np.random.default_rng(seed).permutation(numbers)[:count]
    return torch.from_numpy(vectors(np.sort(drawn)).astype(np.float32))


def store_in(folder: Path, cache_gb: float) -> StorePlace | None:
    """The store inside a run's directory; None with a budget of 0 GB."""
    limit = int(cache_gb * 1e9)
    return StorePlace(folder / SIGNALS, limit) if limit else None


def delete_signals(folder: Path) -> None:
    """Delete the signals that a run stored for a finished stage."""
    shutil.rmtree(folder / SIGNALS, ignore_errors=True)
