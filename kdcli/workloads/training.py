"""Jobs that train a model on a workload, and the terms of their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from kdcli.errors import UsageError
from kdcli.models.capture import Capture, params_without_grad
from kdcli.models.model import Model
from kdcli.recipe.sections import KdSettings, TrainSettings
from kdcli.targets.targets import Targets
from kdcli.types import Batch, Examples, Job, Order, Schedule, Signals, StepLoss, Term, task_title

if TYPE_CHECKING:
    from kdcli.workloads.workload import Workload

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
