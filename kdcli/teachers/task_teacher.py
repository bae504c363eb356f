"""Teachers on a task: models fine-tuned for it, whose logits, and for some methods whose states, are learned."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kdcli.downstream.task import PreparedTask
from kdcli.errors import UsageError
from kdcli.losses.soft_targets import soft_loss
from kdcli.models.card import weights_hash
from kdcli.models.heads import TaskModel, load_for_task
from kdcli.recipe.sections import KdSettings
from kdcli.teachers.cache import SignalStore
from kdcli.teachers.teacher import Teacher
from kdcli.training.progress import Progress
from kdcli.types import Batch, Examples, Kind, Needs, Signals


def load_teacher(
    source: str, task: PreparedTask, tokenizer: PreTrainedTokenizerBase, student: str, label_map: Sequence[int] | None
) -> TaskModel:
    """A teacher that can do the task, reads the same tokens and has its labels in the data's order.

    Args:
        source: hub id or directory.
        tokenizer: that of `student`, which names the model that learns.
        label_map: see `load_for_task`.

    Raises:
        UsageError: see `load_for_task`; another vocabulary.
    """
    found = load_for_task(
        source, task.data.task, label_map=label_map, new_head=False, trust_remote_code=task.session.trust_remote_code
    )
    check_vocabulary(found, tokenizer, student)
    Progress.log(f"teacher {source}: {found.note}")
    return found


def check_vocabulary(teacher: TaskModel, tokenizer: PreTrainedTokenizerBase, student: str) -> None:
    """Raise a `UsageError` where a teacher reads other tokens than the model that learns from it."""
    if teacher.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"teacher {teacher.source} has another vocabulary than {student}",
            "both read the same rows of tokens; take one fine-tuned from a model of the same tokenizer",
        )


Store = tuple[Path, int]
"""A directory in which signals may be kept, and how many bytes of them."""

SIGNALS = "signals"
"""That directory in one of a run, while a stage goes on that reads it."""


@dataclass(frozen=True)
class CachedSignals:
    """Rows of a task, and what a teacher says of a batch of them."""

    examples: Examples
    signals: Callable[[Batch], Signals]


def cached_signals(
    teacher: TaskModel, task: PreparedTask, needs: Needs, passes: float, store: Store | None
) -> CachedSignals:
    """A teacher on a task's rows: asked once where these are read more than once, and what it said kept on disk.

    Args:
        passes: how often the rows are read.
        store: None keeps none.
    """
    assert task.train is not None
    rows, uncached = task.train.rows, Teacher.frozen(teacher.source, teacher.model, needs, task.session)
    if store is None or passes <= 1:
        return CachedSignals(rows, uncached.signals)
    folder, limit = store
    kept = SignalStore.open(
        folder,
        rows,
        uncached.captured,
        needs=needs,
        fingerprint=weights_hash(teacher.model),
        device=task.session.device,
        limit_bytes=limit,
        log=Progress.log,
    )
    if kept is None:
        return CachedSignals(rows, uncached.signals)
    # What is held out is in no store.
    return CachedSignals(
        kept.examples(), lambda batch: kept.signals(batch) if kept.fills(batch) else uncached.signals(batch)
    )


def store_in(folder: Path, cache_gb: float) -> Store | None:
    """Where a run may keep what a teacher says; None where it may keep nothing."""
    limit = int(cache_gb * 1e9)
    return (folder / SIGNALS, limit) if limit else None


def delete_signals(folder: Path) -> None:
    """Delete what a run kept for a stage that is over."""
    shutil.rmtree(folder / SIGNALS, ignore_errors=True)


def kd_terms(
    kind: Kind, kd: KdSettings, hard: Tensor, student: Signals, teachers: Sequence[Signals]
) -> Mapping[str, Tensor]:
    """The terms of a loss against labels and teachers: `(1 − weight) · hard + weight · soft`.

    Several teachers count alike. The mean of their losses has the gradient of the loss against the mean of their
    distributions, for it is linear in what is learned from.

    Args:
        hard: the loss against the labels.
        student, teachers: with logits; without teachers the labels alone count.
    """
    if not teachers or student.labels is None:
        return {"task": hard}
    assert student.logits is not None
    logits = student.logits
    soft = sum(
        (soft_loss(kind, _logits(t), logits, student.labels, student.mask, kd.temperature) for t in teachers),
        logits.new_zeros((), dtype=hard.dtype),
    )
    terms = {"task": (1 - kd.weight, hard), "kd": (kd.weight, soft / len(teachers))}
    return {name: weight * value for name, (weight, value) in terms.items() if weight}


def _logits(signals: Signals) -> Tensor:
    assert signals.logits is not None
    return signals.logits
