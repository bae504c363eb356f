"""Build the jobs of a distillation on a task: the method's objective, and the prediction stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from kdcli.models.capture import Capture
from kdcli.models.model import Model
from kdcli.recipe.sections import KdSettings
from kdcli.report.schema import STUDENT
from kdcli.targets.cache import LOGITS_KEY
from kdcli.targets.targets import PrecomputedLogits, StorePlace, Targets, targets_of
from kdcli.types import Job, Needs, Objective, Schedule
from kdcli.verbs.distill.student import (
    Student,
    distill_job,
    fit_projections,
    freeze_unreached,
    objective_terms,
)
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.settings import FinetuneRecipe, FinetuneTrainSettings
from kdcli.workloads.training import taught_job


def objective_job(
    workload: LabelledWorkload,
    settings: FinetuneTrainSettings,
    encoder: PreTrainedModel,
    objective: Objective,
    teacher: Model,
    place: StorePlace | None,
) -> tuple[Student, Job, Schedule]:
    """Build a job that trains a method's objective on a task's rows, without their labels.

    Args:
        workload: The task.
        settings: How the student is trained.
        encoder: The student.
        objective: The method's objective.
        teacher: The teacher.
        place: Where the teacher's signals may be stored; None stores none.

    Returns the student, the job and its schedule.
    """
    # Scoring has moved the teacher to the device.
    network, rows = teacher.model.cpu(), workload.train_rows
    fit_projections(objective, network, encoder, rows)
    student = Student(encoder, objective)
    freeze_unreached({STUDENT: student}, network, rows.batch(np.arange(1)))
    plan = workload.plan(settings)
    targets = targets_of(
        teacher,
        rows,
        objective.teacher_needs,
        workload.session,
        passes=plan.schedule.steps / plan.steps_per_pass,
        place=place,
    )
    return student, distill_job({STUDENT: student}, targets, workload, plan.order), plan.schedule


def prediction_job(
    workload: LabelledWorkload,
    recipe: FinetuneRecipe,
    kd: KdSettings,
    student: Model,
    teachers: Sequence[Model | PrecomputedLogits],
    objective: Objective | None,
    place: StorePlace | None,
    *,
    dry_run: bool = False,
) -> tuple[Job, Schedule]:
    """Build a job that trains a student against the labels and the teachers' logits.

    If the teachers' logits of held-out rows are unknown, the held-out loss uses the labels alone.

    Args:
        workload: The task.
        recipe: How the student is trained.
        kd: How the teachers' logits are weighted against the labels.
        student: The student.
        teachers: The teachers, or logits from a file.
        objective: An objective against the first teacher, which is added to the loss.
        place: Where signals may be stored if there is a single teacher, or if a teacher has its
            own tokenizer.
        dry_run: Only measure, and compute no signals in advance.

    Returns the job and its schedule.
    """
    needs, projections = Needs(), None
    if objective is not None:
        needs = objective.teacher_needs
        if any(True for _ in objective.projections.parameters()):
            projections = objective.projections
            first = teachers[0]
            assert isinstance(first, Model)
            network, rows = first.model.cpu(), workload.train_rows
            fit_projections(objective, network, student.model, rows)
    targets: list[Targets] = []
    # Without a weight and without an objective, nothing is learned from the teachers.
    if kd.weight or objective is not None or not workload.has_labels:
        plan = workload.plan(recipe.train)
        passes = plan.schedule.steps / plan.steps_per_pass
        targets = targets_of_all(workload, teachers, needs, passes, place, dry_run=dry_run)
    extra_terms = None if objective is None else partial(objective_terms, objective)
    job, schedule = taught_job(
        workload, student, recipe.train, recipe.keep, targets, kd, extra_terms
    )
    if objective is not None:
        captured = job.modules["model"]
        assert isinstance(captured, Capture)
        captured.needs = captured.needs | objective.student_needs
    if projections is not None:
        job = replace(job, modules={**job.modules, "projections": projections})
    return job, schedule


def targets_of_all(
    workload: LabelledWorkload,
    teachers: Sequence[Model | PrecomputedLogits],
    needs: Needs,
    passes: float,
    place: StorePlace | None,
    *,
    dry_run: bool,
) -> list[Targets]:
    """Return the signals of each teacher for the examples.

    `needs` are the signals of the first teacher that an objective reads.
    """
    listed: list[Targets] = []
    for number, teacher in enumerate(teachers):
        if isinstance(teacher, PrecomputedLogits):
            listed.append(teacher)
            continue
        # The signals of a single teacher are stored. The logits of a teacher with rows of its own
        # are always stored.
        single = len(teachers) == 1 or workload.needs_own_rows(teacher)
        targets = workload.targets(
            teacher,
            needs if number == 0 else Needs(),
            passes=passes,
            place=place if single else None,
            dry_run=dry_run,
        )
        if isinstance(targets, PrecomputedLogits):
            targets = replace(targets, key=f"{LOGITS_KEY}.{number}")
        listed.append(targets)
    return listed
