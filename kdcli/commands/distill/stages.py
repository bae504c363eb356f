"""The stages of a task's distillation as the engine sees them: the method's objective, then the labels and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.commands.distill.student import Student, distilling, freeze_unreached
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.downstream.task import PreparedTask, build_job, order_and_schedule, task_loss
from kdcli.models.capture import Capture
from kdcli.models.heads import TaskModel
from kdcli.recipe.sections import KdSettings
from kdcli.teachers.task_teacher import Store, cached_signals, kd_terms
from kdcli.types import Batch, Job, Needs, Objective, Schedule, StepLoss

STUDENT = "student"
"""Name of the one that learns, in logs and reports."""


def intermediate(
    task: PreparedTask,
    recipe: FinetuneRecipe,
    encoder: PreTrainedModel,
    objective: Objective,
    teacher: TaskModel,
    store: Store | None,
) -> tuple[Student, Job, Schedule]:
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
    order, schedule = order_and_schedule(task, recipe)
    heard = cached_signals(teacher, task, objective.teacher_needs, schedule.steps / order.steps_of_pass, store)
    job = distilling({STUDENT: student}, heard.signals, heard.examples, order, task.evaluator.features.rows)
    return student, job, schedule


def prediction(
    task: PreparedTask,
    recipe: FinetuneRecipe,
    kd: KdSettings,
    headed: TaskModel,
    teachers: Sequence[TaskModel],
    objective: Objective | None,
    store: Store | None,
) -> tuple[Job, Schedule]:
    """The loss against labels and the teachers' logits, and an objective that is added to it.

    Args:
        recipe: `train:` of this stage.
        headed: the student with the task's head.
        teachers: the first is the one of the objective.
        objective: None adds nothing.
        store: see `remembered`; what several teachers say is not kept.
    """
    plain, schedule = build_job(task, recipe, headed)
    kind, listened = task.data.task.kind, plain.modules["model"]
    assert isinstance(listened, Capture)
    modules, of_first = dict(plain.modules), Needs(logits=True)
    if objective is not None:
        listened.needs = listened.needs | objective.student_needs
        of_first = of_first | objective.teacher_needs
        if any(True for _ in objective.projections.parameters()):
            modules["projections"] = objective.projections
    order, _ = order_and_schedule(task, recipe)
    passes = schedule.steps / order.steps_of_pass
    heard = [
        cached_signals(
            teacher, task, Needs(logits=True) if number else of_first, passes, store if len(teachers) == 1 else None
        )
        for number, teacher in enumerate(teachers)
    ]

    def step(batch: Batch) -> StepLoss:
        # First of all, for it takes out of the batch what no model reads.
        said = [teacher.signals(batch) for teacher in heard] if "labels" in batch else []
        loss, signals = task_loss(kind, listened, batch)
        terms = dict(kd_terms(kind, kd, loss, signals, said))
        if objective is not None and said:
            terms |= objective.terms(said[0], signals)
        return StepLoss(torch.stack([t.float() for t in terms.values()]).sum(), terms, signals.logits)

    return replace(plain, modules=modules, step=step, examples=heard[0].examples), schedule
