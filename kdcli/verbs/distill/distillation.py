"""Students that learn from teachers: how they are described, and the objective that trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from kdcli.disk import as_directory
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.models.card import describe, describe_source
from kdcli.models.grammar import is_family
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent
from kdcli.models.training_rows import all_rows
from kdcli.report.entry import Entry, timed_subject
from kdcli.report.schema import TEACHER, UNDISTILLED, Role
from kdcli.run.context import RunContext
from kdcli.targets.targets import StorePlace, targets_of
from kdcli.types import Card, Job, ModelShape, RowHashes
from kdcli.verbs.distill.family import members
from kdcli.verbs.distill.fast import how_distilled
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.student import (
    Student,
    distill_job,
    fit_projections,
    freeze_unreached,
    teacher_needs,
)
from kdcli.verbs.distill.students import Planned
from kdcli.workloads.training_plan import Plan
from kdcli.workloads.workload import Workload


@dataclass(eq=False)
class Distillation:
    """Students that learn from the same teachers on the same data, in one stage.

    A subclass builds the objective and the targets of one kind of data.

    Attributes:
        context: The run, or the stage of a run.
        workload: The data.
        teachers: The teachers. An objective reads the first one. Empty if a file teaches.
        origin: The model that students are made from, or whose tokenizer they have.
        students: The students by name.
        card: The description of the first teacher as it was loaded; None without a teacher.
    """

    context: RunContext[DistillRecipe]
    workload: Workload
    teachers: Sequence[Model]
    origin: Model
    students: Mapping[str, Planned]
    card: Card | None

    @property
    def recipe(self) -> DistillRecipe:
        """The recipe of the stage."""
        return self.context.recipe

    @property
    def folder(self) -> Path:
        """The directory of the stage."""
        return self.context.folder

    @property
    def rows(self) -> RowHashes:
        """The labelled rows that trained the teachers, their students or what these start from."""
        models = (self.origin, *self.teachers)
        return all_rows(self.workload.rows, *(model.rows for model in models))

    def model_folder(self, name: str) -> Path:
        """Return where a student is saved: the stage's directory, or its own directory in it."""
        if len(self.students) == 1:
            return self.folder
        return self.folder / as_directory(name).replace(" ", "-")

    def initialized(
        self,
        shapes: Mapping[str, ModelShape],
        make: Callable[[ModelShape], InitializedStudent],
    ) -> dict[str, InitializedStudent]:
        """Make students before training: each one, or the members of a family from the largest."""
        if not is_family(self.recipe.student.to):
            return {name: make(shape) for name, shape in shapes.items()}
        largest = max(shapes.values(), key=lambda shape: shape.layers)
        depths = {name: shape.layers for name, shape in shapes.items()}
        return members(make(largest), depths)

    def members(self, whole: PreTrainedModel) -> dict[str, PreTrainedModel]:
        """Return the student, or the members of a family, given the largest one."""
        shapes = {name: planned.shape for name, planned in self.students.items()}
        made = self.initialized(shapes, lambda shape: InitializedStudent(whole, []))
        return {name: built.model for name, built in made.items()}

    def cards(self, networks: Mapping[str, PreTrainedModel]) -> dict[str, Card]:
        """Describe the first teacher and the students, for a dry run."""
        if not self.context.dry_run:
            return {}
        cards = {} if self.card is None else {TEACHER: self.card}
        for name, network in networks.items():
            cards[name] = describe(network, str(self.model_folder(name)), None)
        return cards

    def entries(
        self,
        networks: Mapping[str, PreTrainedModel],
        *,
        role: Role = "student",
        folder: Path | None = None,
    ) -> list[Entry]:
        """Describe the first teacher and the students, which have been saved.

        Args:
            networks: The students by name.
            role: Their role.
            folder: Where a single student was saved; None for `model_folder`.
        """
        models, baseline, source = list[Entry](), None, None
        if self.teachers:
            baseline, source = TEACHER, self.teachers[0].source
            timed = timed_subject(TEACHER, self.teachers[0])
            models.append(Entry(TEACHER, "teacher", self.card, timed=timed))
        made = how_distilled(self.card, self.recipe)
        for name, network in networks.items():
            place = folder or self.model_folder(name)
            saved = Entry.saved(name, role, network, place, baseline, made=made, source=source)
            models.append(replace(saved, variant=self.students[name].variant))
        return models


def card_of(teachers: Sequence[Model]) -> Card | None:
    """Describe the first teacher. Call it before a stage changes the teacher's weights."""
    return describe_source(teachers[0].model, teachers[0].source) if teachers else None


def objective_job(
    students: Mapping[str, Student],
    teacher: Model,
    workload: Workload,
    plan: Plan,
    *,
    place: StorePlace | None = None,
    trains: bool = True,
    on_step_end: Callable[[int], None] | None = None,
) -> Job:
    """Build the job that trains objectives against one teacher's signals, without labels.

    Both models must be on the CPU. The teacher is moved to the device afterwards.

    Args:
        students: The students by name.
        teacher: The teacher.
        workload: The data.
        plan: The order and number of the steps.
        place: Where the teacher's signals may be stored; None computes them in every step.
        trains: Whether the students are trained. Otherwise no weight needs to be frozen.
        on_step_end: See `Job.on_step_end`.
    """
    for student in students.values():
        fit_projections(student.objective, teacher.model, student.encoder, workload.sample)
    if trains:
        freeze_unreached(students, teacher.model, workload.examples.batch(np.arange(1)))
    targets = targets_of(
        teacher,
        workload.examples,
        teacher_needs(students),
        workload.session,
        passes=plan.schedule.steps / plan.steps_per_pass,
        place=place,
    )
    return distill_job(students, targets, workload, plan.order, on_step_end=on_step_end)


def log_notes(name: str, notes: Sequence[str]) -> None:
    """Log how a student was made and how it learns."""
    for note in notes:
        Progress.log(f"{name}: {note}")


def held_out_losses(run_dir: RunDir, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Read each student's held-out loss and its terms from the log of a run.

    They are read before training, under the name of the undistilled student, and after training.
    Without training, there is only the student.
    """
    records = [record for record in run_dir.read_log() if "held_out" in record]
    first, last = records[0], records[-1]
    quality: dict[str, dict[str, float]] = {}
    for name in names:
        prefix = f"{name}/" if len(names) > 1 else ""
        labels = [(name, last["held_out"])]
        if last["step"]:
            labels.insert(0, (name + UNDISTILLED, first["held_out"]))
        for label, losses in labels:
            terms = {
                k.removeprefix(prefix): v
                for k, v in losses.items()
                if k.startswith(prefix) and k != "loss"
            }
            quality[label] = {"loss": sum(terms.values())} | terms
    return quality
