"""Teachers on a task: models fine-tuned for it, whose logits, and for some methods whose states, are learned."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.losses.hard import mean_over
from kdcli.losses.soft_targets import soft_loss
from kdcli.models.card import weights_hash
from kdcli.models.heads import load_for_task
from kdcli.models.model import Model
from kdcli.recipe.sections import KdSettings
from kdcli.targets.cache import SignalStore
from kdcli.targets.teacher import Teacher
from kdcli.types import Batch, Examples, Kind, Needs, Signals, Term
from kdcli.workloads.settings import LabelledSettings
from kdcli.workloads.task import PreparedTask, read_by

SIGNALS = "signals"  # Directory of a run for cached signals, while a stage reads them

Array = np.ndarray[Any, Any]
Store = tuple[Path, int]  # A directory for cached signals and the bytes they may take


ROW_KINDS: tuple[Kind, ...] = ("class", "multi", "score")
"""Kinds with logits of whole rows, which a teacher may read as tokens of its own."""


def load_teacher(
    source: str,
    task: PreparedTask,
    tokenizer: PreTrainedTokenizerBase,
    student: str,
    label_map: Sequence[int] | None,
    *,
    own_tokens: bool = False,
) -> Model:
    """Load a teacher fine-tuned for the task; a `UsageError` if `tokenizer`, that of `student`, is another, unless it
    may read `own_tokens`."""
    trusted = task.session.trust_remote_code
    teacher = load_for_task(
        source, task.data.task, label_map=label_map, new_head=False, trust_remote_code=trusted
    )
    if not own_tokens:
        check_vocabulary(teacher, tokenizer, student)
    Progress.log(f"teacher {source}: {teacher.note}")
    return teacher


def check_vocabulary(teacher: Model, tokenizer: PreTrainedTokenizerBase, student: str) -> None:
    """Raise a `UsageError` if teacher and student have different vocabularies."""
    if not same_tokens(teacher.tokenizer, tokenizer):
        raise UsageError(
            f"teacher {teacher.source} has another vocabulary than {student}",
            "both read the same rows of tokens; take one fine-tuned from a model of the same tokenizer",
        )


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two models can read the same rows of tokens."""
    return bool(one.get_vocab() == other.get_vocab())


@dataclass(frozen=True)
class CachedSignals:
    """Rows of a task, and a function from a batch of them to the teacher's signals."""

    examples: Examples
    signals: Callable[[Batch], Signals]


def cached_signals(
    teacher: Model, task: PreparedTask, needs: Needs, passes: float, store: Store | None
) -> CachedSignals:
    """A teacher's signals for a task's rows, cached in `store`, if any, where training makes several passes."""
    assert task.train is not None
    rows = task.train.rows
    live = Teacher.frozen(teacher.source, teacher.model, needs, task.session)
    if store is None or passes <= 1:
        return CachedSignals(rows, live.signals)
    how: dict[str, Any] = {
        "fingerprint": weights_hash(teacher.model),
        "device": task.session.device,
    }
    cache = SignalStore.open(
        store[0], rows, live.captured, needs=needs, limit_bytes=store[1], log=Progress.log, **how
    )
    if cache is None:
        return CachedSignals(rows, live.signals)
    # Held-out rows are not cached.
    return CachedSignals(
        cache, lambda batch: cache.signals(batch) if cache.fills(batch) else live.signals(batch)
    )


@dataclass(frozen=True)
class GivenLogits:
    """A teacher's logits [N, C] of the training examples, and of the judged ones if they are known, whatever tokens it
    read."""

    train_NC: Array
    judged_NC: Array | None


@dataclass(frozen=True)
class WithLogits:
    """Rows with given logits, [rows, C], in each batch under `key`; an `Examples`."""

    inner: Examples
    logits_NC: Array
    key: str

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, indices: Array) -> Batch:
        return self.inner.batch(indices) | {self.key: torch.from_numpy(self.logits_NC[indices])}


def logits_by_own_tokens(
    teacher: Model, task: PreparedTask, settings: LabelledSettings, store: Store | None
) -> GivenLogits:
    """The logits of a teacher that reads the task's examples with its own tokenizer, once, kept in `store`; None gives
    zeros, for a dry run. Raises UsageError: the store is too small."""
    own = read_by(task, settings, teacher)
    assert own.train is not None
    fingerprint, needs = weights_hash(teacher.model), Needs(logits=True)
    live, found = Teacher.frozen(teacher.source, teacher.model, needs, task.session).captured, []
    for rows in (own.train.rows, own.evaluator.features.rows):
        logits_NC = np.zeros((len(rows), teacher.model.config.num_labels), np.float32)
        if store is not None:
            how: dict[str, Any] = {
                "fingerprint": fingerprint,
                "device": task.session.device,
                "log": Progress.log,
            }
            kept = SignalStore.open(store[0], rows, live, needs=needs, limit_bytes=store[1], **how)
            if kept is None:
                raise UsageError(
                    "the teacher's logits do not fit on the disk",
                    "raise cache_gb, or free disk space",
                )
            logits_NC[rows.example] = kept.vectors(np.arange(len(rows)))
        found.append(logits_NC)
    return GivenLogits(*found)


def store_in(folder: Path, cache_gb: float) -> Store | None:
    """The store of a run; None with a budget of 0 GB."""
    limit = int(cache_gb * 1e9)
    return (folder / SIGNALS, limit) if limit else None


def delete_signals(folder: Path) -> None:
    """Delete the signals a run cached for a finished stage."""
    shutil.rmtree(folder / SIGNALS, ignore_errors=True)


def kd_terms(
    kind: Kind, kd: KdSettings, hard: Tensor, student: Signals, teachers: Sequence[Signals]
) -> Mapping[str, Term]:
    """The terms of a loss against labels and teachers: `(1 - weight) * hard + weight * soft`. `soft` is the mean over
    the teachers. Its gradient is that of the loss against their mean distribution. `hard`: the loss against the labels,
    the only term if there are no teachers or labels. `student`, `teachers`: with logits."""
    if not teachers or student.labels is None:
        return {"task": Term(hard, mean_over(kind))}
    logits, how = _logits(student), (student.labels, student.mask, kd.temperature)
    zero = logits.new_zeros((), dtype=hard.dtype)
    soft = sum((soft_loss(kind, _logits(t), logits, *how) for t in teachers), zero)
    terms = {"task": (1 - kd.weight, hard), "kd": (kd.weight, soft / len(teachers))}
    return {
        name: Term(weight * value, mean_over(kind))
        for name, (weight, value) in terms.items()
        if weight
    }


def _logits(signals: Signals) -> Tensor:
    assert signals.logits is not None
    return signals.logits
