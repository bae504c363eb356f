"""A frozen teacher's signals: computed in every step, stored on disk, or read from a file."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.text.sentences import Texts
from kdcli.engine.evaluation import to_device
from kdcli.engine.session import Session
from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.models.identity import weights_hash
from kdcli.models.model import Model
from kdcli.targets.cache import LOGITS_KEY, SignalStore, StorePlace
from kdcli.types import Array, Batch, Examples, Needs, Signals


@dataclass(frozen=True)
class Teacher:
    """A frozen model and the signals captured from it."""

    source: str
    captured: Capture

    @classmethod
    def frozen(
        cls,
        source: str,
        model: PreTrainedModel,
        needs: Needs,
        session: Session,
        pool: nn.Module | None = None,
    ) -> Self:
        """Freeze a model and capture its signals.

        The model is put into eval mode, moved to the device and converted to the compute dtype.

        Args:
            source: The model's name in messages.
            model: The model.
            needs: The signals to capture.
            session: The device and compute dtype.
            pool: Pooling of an embedding model, which stays in float32.
        """
        model = prepare_teacher(model.to(session.device), session.compute_dtype)
        if pool is not None:
            pool.to(session.device).requires_grad_(False)
        return cls(source, capture(model, needs, pool))

    def signals(self, batch: Batch) -> Signals:
        """Compute the signals of a batch without gradients."""
        with torch.no_grad(), torch.autocast(batch["input_ids"].device.type, enabled=False):
            signals: Signals = self.captured(batch)
        return signals


SIGNALS = "signals"
"""Folder in a run directory for signals that are stored while a stage needs them."""


class Targets(Protocol):
    """A teacher's signals for the batches of a training run."""

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        """Return both sets of examples with the teacher's tensors added to their batches."""

    def signals(self, batch: Batch) -> Signals | None:
        """Take the teacher's signals out of a batch, or compute them.

        Returns:
            None if the batch has no signals.
        """


@dataclass(frozen=True)
class LiveTargets:
    """Targets that the teacher computes in every step."""

    teacher: Teacher

    def attach(self, examples: Examples, held_out: Examples) -> tuple[Examples, Examples]:
        return examples, held_out

    def signals(self, batch: Batch) -> Signals | None:
        return self.teacher.signals(batch)


@dataclass(frozen=True)
class StoredTargets:
    """Targets from a store for training rows. The teacher computes them for held-out rows."""

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
    """Targets from precomputed logits, of a teacher with its own tokenizer or from a file.

    Attributes:
        train_NC: Logits for the training rows, [N, C].
        held_out_NC: Logits for the held-out rows; None if they are unknown.
        key: The key of the logits in a batch.
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
    """Examples whose batches also have a teacher's logits, [B, C], under `key`."""

    inner: Examples
    logits_NC: Array
    key: str

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Array) -> Batch:
        """Collate the given rows and add their logits."""
        return self.inner.batch(indices) | {self.key: torch.from_numpy(self.logits_NC[indices])}


POOLED_KEY, POSITIVE_KEY, NEGATIVES_KEY = "teacher.pooled", "teacher.positive", "teacher.negatives"
LAZY_ROWS = 32
"""Number of texts in a forward pass of `LazyVectors`."""
Vectors = Callable[[Array], Array]
"""Function from numbers of texts to the teacher's vectors for these texts, [n, E]."""


@dataclass(frozen=True)
class LazyVectors:
    """A teacher's vectors that are computed when they are first read.

    Attributes:
        teacher: Computes the vectors.
        rows: The texts, tokenised for the teacher.
        device: The teacher's device.
    """

    teacher: Teacher
    rows: TokenizedRows
    device: torch.device
    _known: dict[int, Array] = field(default_factory=dict)

    def __call__(self, at: Array) -> Array:
        """Return the vectors for text numbers, [n, E] float32."""
        missing = np.array(sorted(set(at.tolist()) - set(self._known)), np.int64)
        # Rows of similar length need little padding.
        missing = missing[np.argsort(self.rows.lengths[missing], kind="stable")]
        for numbers in np.array_split(missing, -(-len(missing) // LAZY_ROWS) or 1):
            if not len(numbers):
                continue
            batch = to_device(self.device, self.rows.batch(numbers))
            pooled = self.teacher.signals(batch).pooled
            assert pooled is not None
            self._known.update(zip(numbers.tolist(), pooled.float().cpu().numpy(), strict=True))
        return np.stack([self._known[number] for number in at.tolist()])


@dataclass(frozen=True)
class VectorTargets:
    """Targets from an embedding teacher: vectors for texts, their positives and negatives, anchors.

    Attributes:
        vectors: Returns the vectors for text numbers.
        texts: The texts, with their positives and negatives.
        anchors_RE: Vectors for a fixed sample of texts, shared by all batches.
        live: Computes other signals in every step; None if no loss needs them.
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
            batch.pop(name, None) for name in (POOLED_KEY, POSITIVE_KEY, NEGATIVES_KEY)
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
    """Examples whose batches also have the teacher's vectors. `inner.numbers` are their texts."""

    inner: Any
    vectors: Vectors
    texts: Texts

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Array) -> Batch:
        """Collate the given texts and add the teacher's vectors.

        Returns:
            The texts' tokens; `teacher.pooled` [B, E]; and for pairs also `teacher.positive`
            [B, E] and `teacher.negatives` [B, M, E].
        """
        batch: Batch = self.inner.batch(indices)
        at, texts = self.inner.numbers[indices], self.texts
        batch[POOLED_KEY] = self._vectors(at)
        if texts.paired:
            batch[POSITIVE_KEY] = self._vectors(texts.positive[at])
            if texts.negatives.shape[1]:
                flat = self._vectors(texts.negatives[at].reshape(-1))
                batch[NEGATIVES_KEY] = flat.view(*texts.negatives[at].shape, -1)
        return batch

    def _vectors(self, at: Array) -> Tensor:
        """Return the vectors for text numbers, with zeros for number -1."""
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
    """Return a frozen teacher's targets for rows, stored if training reads them several times.

    Moves the teacher to the device and converts it to the compute dtype.

    Args:
        teacher: The teacher.
        rows: The training rows.
        needs: The signals.
        session: The device and compute dtype.
        passes: Number of passes over the rows.
        place: Where signals may be stored; None computes them in every step.
    """
    live = Teacher.frozen(teacher.source, teacher.model, needs, session)
    if place is None or not place.limit_bytes:
        return LiveTargets(live)
    if passes <= 1 or not isinstance(rows, TokenizedRows):
        return LiveTargets(live)
    fingerprint = weights_hash(teacher.model)
    store = SignalStore.open(place, rows, live.captured, needs, fingerprint, session)
    return LiveTargets(live) if store is None else StoredTargets(store, live)


def anchors_of(vectors: Vectors, numbers: Array, count: int, seed: int) -> Tensor:
    """Return the vectors for `count` random texts, [R, E] float32."""
    sample = np.random.default_rng(seed).permutation(numbers)[:count]
    return torch.from_numpy(vectors(np.sort(sample)).astype(np.float32))


def store_in(folder: Path, cache_gb: float) -> StorePlace:
    """Return the place for stored signals in a run directory, which may have no room at all."""
    return StorePlace(folder / SIGNALS, int(cache_gb * 1e9))


def delete_signals(folder: Path) -> None:
    """Delete the signals that were stored for a finished stage."""
    shutil.rmtree(folder / SIGNALS, ignore_errors=True)
