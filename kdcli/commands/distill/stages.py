"""The stages of a task's distillation as the engine sees them: the method's objective, then the labels and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.commands.distill.student import Student, distilling, freeze_unreached
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.downstream.task import Downstream, fitting, planned, task_loss
from kdcli.models.capture import Capture
from kdcli.models.heads import Headed
from kdcli.recipe.sections import KdSettings
from kdcli.teachers.task_teacher import Store, remembered, taught
from kdcli.types import Batch, Job, Needs, Objective, Plan, StepLoss

STUDENT = "student"
"""Name of the one that learns, in logs and reports."""


def intermediate(
    task: Downstream,
    recipe: FinetuneRecipe,
    encoder: PreTrainedModel,
    objective: Objective,
    teacher: Headed,
    store: Store | None,
) -> tuple[Student, Job, Plan]:
    """The objective alone, on the task's rows; its labels are not looked at.

    Args:
        recipe: `train:` of this stage.
        encoder: the student as it is.
        store: see `remembered`.
    """
    assert task.train is not None
    student = Student(encoder, objective)
    # Whoever judged the teacher before has taken it to the device.
    freeze_unreached({STUDENT: student}, teacher.model.cpu(), task.train.rows.batch(np.arange(1)))
    order, plan = planned(task, recipe)
    heard = remembered(teacher, task, objective.teacher_needs, plan.steps / order.steps_of_pass, store)
    job = distilling({STUDENT: student}, heard.signals, heard.examples, order, task.judge.features.rows)
    return student, job, plan


def prediction(
    task: Downstream,
    recipe: FinetuneRecipe,
    kd: KdSettings,
    headed: Headed,
    teachers: Sequence[Headed],
    objective: Objective | None,
    store: Store | None,
) -> tuple[Job, Plan]:
    """The loss against labels and the teachers' logits, and an objective that is added to it.

    Args:
        recipe: `train:` of this stage.
        headed: the student with the task's head.
        teachers: the first is the one of the objective.
        objective: None adds nothing.
        store: see `remembered`; what several teachers say is not kept.
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
    order, _ = planned(task, recipe)
    passes = plan.steps / order.steps_of_pass
    heard = [
        remembered(
            teacher, task, Needs(logits=True) if number else of_first, passes, store if len(teachers) == 1 else None
        )
        for number, teacher in enumerate(teachers)
    ]

    def step(batch: Batch) -> StepLoss:
        # First of all, for it takes out of the batch what no model reads.
        said = [teacher.signals(batch) for teacher in heard] if "labels" in batch else []
        loss, signals = task_loss(kind, listened, batch)
        terms = dict(taught(kind, kd, loss, signals, said))
        if objective is not None and said:
            terms |= objective.terms(said[0], signals)
        return StepLoss(torch.stack([t.float() for t in terms.values()]).sum(), terms, signals.logits)

    return replace(plain, modules=modules, step=step, examples=heard[0].examples), plan
