"""The stages of a task's distillation as the engine sees them: the method's objective, then the labels and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.distill_job import Student, distilling, freeze_unreached
from kdcli.downstream import Downstream, fitting, planned, task_loss
from kdcli.models.capture import Capture
from kdcli.models.card import weights_hash
from kdcli.models.heads import Headed
from kdcli.progress import Progress
from kdcli.settings import FinetuneRecipe, KdSettings
from kdcli.signal_store import HIDDEN_KEY, SignalStore
from kdcli.task_teacher import ready, taught
from kdcli.types import Batch, Job, Needs, Objective, Plan, Signals, StepLoss

STUDENT = "student"
"""Name of the one that learns, in logs and reports."""


def intermediate(
    task: Downstream,
    recipe: FinetuneRecipe,
    encoder: PreTrainedModel,
    objective: Objective,
    teacher: Headed,
    store: tuple[Path, int] | None,
) -> tuple[Student, Job, Plan]:
    """The objective alone, on the task's rows; its labels are not looked at.

    Args:
        recipe: `train:` of this stage.
        encoder: the student as it is.
        store: where the teacher's signals may be kept, and how many bytes of them; None keeps none.
    """
    assert task.train is not None
    rows = task.train.rows
    student = Student(encoder, objective)
    # Whoever judged the teacher before has taken it to the device.
    freeze_unreached({STUDENT: student}, teacher.model.cpu(), rows.batch(np.arange(1)))
    heard = ready(teacher, task, objective.teacher_needs)
    kept = None
    if store is not None:
        folder, limit = store
        kept = SignalStore.open(
            folder,
            rows,
            heard.listened,
            needs=objective.teacher_needs,
            fingerprint=weights_hash(teacher.model),
            device=task.device,
            limit_bytes=limit,
            log=Progress.say,
        )

    def cached(batch: Batch) -> Signals:
        # What is held out is in no store.
        return kept.signals(batch) if kept is not None and HIDDEN_KEY in batch else heard.signals(batch)

    order, plan = planned(task, recipe)
    held_out = task.judge.features.rows
    job = distilling({STUDENT: student}, cached, kept.examples() if kept else rows, order, held_out)
    return student, job, plan


def prediction(
    task: Downstream,
    recipe: FinetuneRecipe,
    kd: KdSettings,
    headed: Headed,
    teachers: Sequence[Headed],
    objective: Objective | None,
) -> tuple[Job, Plan]:
    """The loss against labels and the teachers' logits, and an objective that is added to it.

    Args:
        recipe: `train:` of this stage.
        headed: the student with the task's head.
        teachers: the first is the one of the objective.
        objective: None adds nothing.
    """
    plain, plan = fitting(task, recipe, headed)
    kind, listened = task.data.task.kind, plain.modules["model"]
    assert isinstance(listened, Capture)
    modules, of_first = dict(plain.modules), Needs(logits=True)
    if objective is not None:
        listened.needs = listened.needs | objective.student_needs
        of_first = of_first | objective.teacher_needs
        if any(True for _ in objective.projections.parameters()):
            modules["projections"] = objective.projections
    heard = [
        ready(teacher, task, of_first if number == 0 else Needs(logits=True)) for number, teacher in enumerate(teachers)
    ]

    def step(batch: Batch) -> StepLoss:
        loss, signals = task_loss(kind, listened, batch)
        said = [teacher.signals(batch) for teacher in heard] if signals.labels is not None else []
        terms = dict(taught(kind, kd, loss, signals, said))
        if objective is not None and said:
            terms |= objective.terms(said[0], signals)
        return StepLoss(torch.stack([t.float() for t in terms.values()]).sum(), terms, signals.logits)

    return replace(plain, modules=modules, step=step), plan
