"""The vectors of an embedding model as a teacher's: computed once, stored, and batches of texts with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kdcli.data.batches import BucketOrder
from kdcli.data.labelled.features import Array, TokenizedRows
from kdcli.data.text.sentences import Texts
from kdcli.disk import cache_dir
from kdcli.engine.launch import Session, make_schedule
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.models.embedder import Pool
from kdcli.recipe.sections import TrainSettings
from kdcli.targets.cache import SignalStore
from kdcli.targets.teacher import Teacher
from kdcli.types import Batch, Needs, Schedule, Signals
from kdcli.workloads.embedder import Embedder

GROUP = 16  # Rows padded together
POOLED, POSITIVE, NEGATIVES = (
    "teacher.pooled",
    "teacher.positive",
    "teacher.negatives",
)  # of a batch

Vectors = Callable[[Array], Array]  # numbers of texts -> the teacher's vectors of them, [n, E]


@dataclass(frozen=True)
class Targets:
    """Rows of tokens with the teacher's vectors; an `Examples`. `numbers`: the texts in it."""

    rows: TokenizedRows
    vectors: Vectors
    texts: Texts
    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: Array) -> Batch:
        """The batch of some texts, with `teacher.pooled` [B, E] and of pairs `teacher.positive` and `.negatives`."""
        at, texts = self.numbers[indices], self.texts
        batch = self.rows.batch(at)
        batch[POOLED] = self._of(at)
        if texts.paired:
            batch[POSITIVE] = self._of(texts.positive[at])
            if texts.negatives.shape[1]:
                batch[NEGATIVES] = self._of(texts.negatives[at].reshape(-1)).view(
                    *texts.negatives[at].shape, -1
                )
        return batch

    def _of(self, at: Array) -> Tensor:
        """Vectors of texts, zeros of number -1."""
        found = torch.from_numpy(self.vectors(np.maximum(at, 0)).astype(np.float32))
        return found * torch.from_numpy((at >= 0).astype(np.float32))[:, None]


def signals_of(batch: Batch, anchors_RE: Tensor, live: Teacher | None = None) -> Signals:
    """The vectors taken out of a batch of `Targets`, and the anchors, beside the signals of `live`, if there is one."""
    pooled, positive, negatives = (batch.pop(name, None) for name in (POOLED, POSITIVE, NEGATIVES))
    found = live.signals(batch) if live else Signals(mask=batch["attention_mask"])
    anchors = anchors_RE.to(batch["input_ids"].device)
    return replace(found, pooled=pooled, positive=positive, negatives=negatives, anchors=anchors)


def anchors_of(vectors: Vectors, numbers: Array, count: int, seed: int) -> Tensor:
    """The vectors of `count` of the texts, drawn by the seed, [R, E] float32."""
    drawn = np.random.default_rng(seed).permutation(numbers)[:count]
    return torch.from_numpy(vectors(np.sort(drawn)).astype(np.float32))


def stored_vectors(
    teacher: Embedder,
    rows: TokenizedRows,
    cache_gb: float,
    session: Session,
    *,
    dry_run: bool = False,
) -> Vectors:
    """The teacher's vectors of rows: computed, or read from the cache; random ones in a dry run. Its model is frozen,
    on the device and in the compute dtype afterwards. Raises UsageError: they take more than `cache_gb`."""
    if dry_run:
        width = teacher.format.width(teacher.model.config.hidden_size)
        return lambda at: np.random.default_rng(0).standard_normal(
            (len(at), width), dtype=np.float32
        )
    needs = Needs(pooled=True)
    live = Teacher.frozen(
        teacher.source, teacher.model, needs, session, Pool(teacher.format)
    ).captured
    store = SignalStore.open(
        cache_dir() / "vectors",
        rows,
        live,
        needs=needs,
        fingerprint=f"{teacher.fingerprint}-{session.compute_dtype}",
        device=session.device,
        limit_bytes=int(cache_gb * 1e9),
        log=Progress.log,
    )
    if store is None:
        raise UsageError(
            "the teacher's vectors do not fit", "raise embedding.cache_gb, or lower embedding.rows"
        )
    return store.vectors


def order_of_texts(settings: TrainSettings, lengths: Array) -> tuple[BucketOrder, Schedule]:
    """Batches of texts of similar length, and the schedule of their passes."""
    group = settings.micro_batch_size or GROUP
    order = BucketOrder(lengths, settings.batch_size, group, settings.seed)
    return order, replace(make_schedule(settings, order.steps_of_pass), micro_batch_size=group)
