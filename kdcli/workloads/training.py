"""Jobs that train a model on a workload, and the terms of their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.engine.launch import make_schedule
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.models.capture import Capture, params_without_grad
from kdcli.models.model import Model
from kdcli.recipe.sections import KdSettings, TrainSettings
from kdcli.targets.targets import Targets
from kdcli.types import (
    Array,
    Batch,
    Examples,
    Job,
    Order,
    Schedule,
    Signals,
    StepLoss,
    Term,
    task_title,
)
from kdcli.workloads.settings import FinetuneTrainSettings

if TYPE_CHECKING:
    from kdcli.workloads.workload import Workload

DEFAULT_POOL = 64
"""Number of batches that are drawn together and grouped by row length."""


class Plan(NamedTuple):
    """The order of the training examples and the schedule.

    Attributes:
        order: The examples of each step.
        schedule: Number of steps and learning rates.
        steps_per_pass: Optimiser steps in one pass over the examples.
    """

    order: Order
    schedule: Schedule
    steps_per_pass: float


def bucketed(lengths: Array, settings: TrainSettings, group: int) -> Plan:
    """Plan batches of groups of rows with similar lengths.

    A micro-batch is a group, unless `train.micro_batch_size` sets another size. The size decides
    nothing but the memory and the padding, so the same rows share a batch with any size.

    Args:
        lengths: Number of tokens in each row.
        settings: The recipe's `train` section.
        group: Number of rows in a group.

    Raises:
        UsageError: No row has a token, or the warm-up is as long as the run.
    """
    if not lengths.any():
        raise UsageError(
            f"none of the {len(lengths):,} rows has a token: the tokenizer finds nothing in them",
            "check the column of the texts and the tokenizer files of the model",
        )
    pool = settings.pool if isinstance(settings, FinetuneTrainSettings) else DEFAULT_POOL
    order = BucketOrder(lengths, settings.batch_size, group, settings.seed, pool)
    schedule = make_schedule(settings, order.steps_of_pass)
    micro = settings.micro_batch_size or group
    return Plan(order, replace(schedule, micro_batch_size=micro), order.steps_of_pass)


def log_padding(order: Order) -> None:
    """Log the share of padding, and what it would be with random batches."""
    if not isinstance(order, BucketOrder):
        return
    lengths = order.lengths
    plain = BatchOrder(len(lengths), order.batch_size, order.seed)
    steps = range(1, min(200, order.steps_of_pass) + 1)
    drawn = [lengths[plain.indices(step)] for step in steps]
    random = 1 - sum(int(b.sum()) for b in drawn) / sum(len(b) * int(b.max()) for b in drawn)
    log(
        f"{len(lengths):,} rows of {lengths.mean():.0f} tokens on average; grouping by length "
        f"leaves {order.padding():.1%} padding (random batches: {random:.1%})"
    )


Keep = Literal["last", "best"]
"""The weights that a run keeps: the last ones, or the ones with the best metric."""


def model_job(
    workload: Workload, model: Model, settings: TrainSettings, keep: Keep
) -> tuple[Job, Schedule]:
    """Build the job that trains a model with the loss `hard`, and its schedule.

    Without labels, the loss is zero. Parameters that do not affect the loss are frozen.
    """
    captured = workload.capture(model)
    plan = workload.plan(settings)

    def step(batch: Batch) -> StepLoss:
        signals = workload.forward(captured, batch)
        loss = total_loss(workload.hard(signals, batch), signals)
        return StepLoss({"loss": Term(loss, workload.over)}, workload.outputs(signals, batch))

    job = training_job(workload, {"model": captured}, step, plan.order, keep)
    batch = first_rows(workload.examples)
    signals = workload.forward(captured, batch)
    outputs = next(x for x in (signals.logits, signals.pooled) if x is not None)
    losses = workload.hard(signals, batch)
    freeze_unused(captured, total_loss(losses, signals) if losses else outputs.sum())
    return job, plan.schedule


def taught_job(
    workload: Workload,
    model: Model,
    settings: TrainSettings,
    keep: Keep,
    targets: Sequence[Targets],
    kd: KdSettings,
    extra_terms: Callable[[Signals, Signals], Mapping[str, Term]] | None = None,
) -> tuple[Job, Schedule]:
    """Build the job that trains a model on the labels and its teachers' targets.

    The loss is the sum of `mixed_terms`. For held-out rows without targets, only the labels
    count.

    Args:
        model: The student.
        settings: The recipe's `train` section.
        keep: The weights to keep.
        targets: The targets from each teacher.
        kd: Weight and temperature of the distillation loss.
        extra_terms: Computes additional terms from the signals of the first teacher and the
            student.
    """
    job, schedule = model_job(workload, model, settings, keep)
    captured = job.modules["model"]
    assert isinstance(captured, Capture)
    examples, held_out = workload.examples, workload.held_out
    for of_teacher in targets:
        examples, held_out = of_teacher.attach(examples, held_out)

    def step(batch: Batch) -> StepLoss:
        # Must come first: it takes out of the batch the tensors that a model does not accept.
        teachers = [s for t in targets if (s := t.signals(batch)) is not None]
        student = workload.forward(captured, batch)
        terms = mixed_terms(workload, student, teachers, batch, kd)
        if extra_terms is not None and teachers:
            terms |= extra_terms(teachers[0], student)
        return StepLoss(terms, workload.outputs(student, batch))

    return replace(job, step=step, examples=examples, held_out=held_out), schedule


def mixed_terms(
    workload: Workload,
    student: Signals,
    teachers: Sequence[Signals],
    batch: Batch,
    kd: KdSettings,
) -> dict[str, Term]:
    """Compute the terms of (1 - weight) * hard + weight * soft.

    `soft` is the mean over the teachers. Its gradient equals the gradient of the loss against
    the teachers' mean distribution. Without teachers, the labels get the full weight. Without
    labels, the teachers get it.
    """
    hard = workload.hard(student, batch)
    if not teachers:
        terms = {name: Term(value, workload.over) for name, value in hard.items()}
        return terms or {"loss": Term(total_loss({}, student), workload.over)}
    weight = kd.weight if hard else 1.0
    terms = {}
    if weight < 1:
        terms = {name: Term((1 - weight) * v, workload.over) for name, v in hard.items()}
    if weight > 0:
        losses = [workload.soft(t, student, batch, kd.temperature) for t in teachers]
        for name, first in losses[0].items():
            total = sum((loss[name] for loss in losses), first.new_zeros(()))
            terms[name] = Term(weight * (total / len(losses)), workload.over)
    return terms


def training_job(
    workload: Workload,
    modules: Mapping[str, torch.nn.Module],
    step: Callable[[Batch], StepLoss],
    order: Order,
    keep: Keep,
) -> Job:
    """Build a job over this workload's examples, with its metrics.

    Raises:
        UsageError: `keep` is "best", but the task has no metrics during training.
    """
    if keep == "best" and not workload.has_metrics:
        raise UsageError(
            f"keep: best needs a metric during training, and {task_title(workload.name)} has none",
            "use keep: last, the default",
        )
    return Job(
        modules,
        step,
        workload.examples,
        order,
        workload.held_out,
        compute_metrics=workload.metrics if workload.has_metrics else None,
        best=workload.metric if keep == "best" else None,
        held_out_size=workload.held_out_size,
    )


def total_loss(losses: Mapping[str, Tensor], signals: Signals) -> Tensor:
    """Add the losses. Without losses, return a zero on the device of the signals."""
    values = list(losses.values())
    if values:
        return values[0] if len(values) == 1 else torch.stack(values).sum()
    first = next(t for t in (signals.logits, signals.pooled, signals.mask) if t is not None)
    return first.new_zeros((), dtype=torch.float32)


def first_rows(examples: Examples) -> Batch:
    """Return a batch on the CPU with the first two examples, or with the only one."""
    return examples.batch(np.arange(min(2, len(examples))))


def freeze_unused(model: torch.nn.Module, loss: Tensor) -> list[str]:
    """Freeze the parameters that a loss does not depend on, and return their names.

    Otherwise weight decay would shrink them, and several processes would sum their zero gradients.
    """
    names = params_without_grad(dict(model.named_parameters()), loss)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names
