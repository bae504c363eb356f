"""Distil a model's outputs: the teacher's outputs, once -> a smaller model -> report.

This serves rerankers and every other workload that has no distillation of its own. The student is
a whole model. It learns the teacher's outputs and the labels, and is compared with its teacher and
with itself before training.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdcli.deploy.latency import Subject
from kdcli.errors import UsageError
from kdcli.models.card import describe, describe_source
from kdcli.models.grammar import parse_shape
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.models.shape import set_dropout
from kdcli.models.training_rows import all_rows
from kdcli.report.entry import Entry
from kdcli.report.schema import STUDENT, TEACHER, UNDISTILLED
from kdcli.run.context import RunContext
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.targets import StorePlace
from kdcli.types import Job, ModelShape, Needs, Outcome, Schedule, task_title
from kdcli.verbs.distill.fast import how_distilled, shape_notes, with_shape
from kdcli.verbs.distill.labelled import check_one_student
from kdcli.verbs.distill.layers import start_of, with_measured_layers
from kdcli.verbs.distill.settings import SOFT_TARGETS, DistillRecipe
from kdcli.workloads import open_workload
from kdcli.workloads.decisions import decisions
from kdcli.workloads.finetuning import request_of, scores_after_training
from kdcli.workloads.plan import log_padding
from kdcli.workloads.recipes import as_finetune
from kdcli.workloads.scores import ModelScores, compare
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.training import taught_job
from kdcli.workloads.workload import Workload

LABELLED_KEYS = (
    "method",
    "stage",
    "loss",
    "relation",
    "general",
    "augment",
    "intermediate",
    "undistilled",
    "more_teachers",
    "soft_labels",
)
"""Keys of a recipe that only labelled rows read."""


@dataclass(frozen=True)
class OutputDistillation:
    """A distillation of outputs, checked.

    Attributes:
        context: The run.
        workload: The data.
        teacher: The teacher; None if the data hold its outputs.
        origin: The model that the student is made from.
        shape: The student's shape.
    """

    context: RunContext[DistillRecipe]
    workload: Workload
    teacher: Model | None
    origin: Model
    shape: ModelShape

    @property
    def run(self) -> Run:
        """The run, which has one stage."""
        resolved = self.context.resolved
        return Run([Stage(self.context.folder, resolved, self.build)], resolved=resolved)

    def make(self) -> Model:
        """Make the student, with the same weights each time."""
        recipe, workload = self.context.recipe, self.workload
        make_student = workload.student if recipe.train.trains else workload.fitted_student
        made: Model = make_student(
            self.origin, self.shape, start_of(recipe.student, recipe.train.seed)
        )
        # The student was saved and loaded again, with its teacher's rates.
        if recipe.student.dropout is not None:
            set_dropout(made.model, recipe.student.dropout)
        if self.teacher is not None:
            workload.adapt_student(made, self.teacher)
        return made

    def build(self) -> StageJob:
        """Compute the teacher's outputs, make the student, and build the job that trains it."""
        workload, context = self.workload, self.context
        recipe, student = context.recipe, self.make()
        # The teacher is scored in float32, before it is cast to the compute dtype.
        scores: dict[str, ModelScores] = {}
        if self.teacher is not None and not context.dry_run:
            if workload.needs_reference:
                workload = workload.with_reference(self.teacher)
            scores[TEACHER] = workload.score(self.teacher)
        card = None
        if self.teacher is not None:
            card = describe_source(self.teacher.model, self.teacher.source)
        job, schedule = self._job(workload, student)
        plan = workload.plan(recipe.train)
        log_padding(plan.order)

        def finish(outcome: Outcome) -> None:
            scores[STUDENT] = scores_after_training(workload, student, outcome)
            if recipe.train.trains:
                scores[STUDENT + UNDISTILLED] = workload.score(self.make())
            if not context.is_main:
                return
            folder = context.folder
            teacher_rows = [self.teacher.rows] if self.teacher else []
            workload.save(student, folder, all_rows(workload.rows, student.rows, *teacher_rows))
            models, baseline, source = [], None, None
            if card is not None and self.teacher is not None:
                baseline, source = TEACHER, self.teacher.source
                timed = Subject(TEACHER, location(source))
                models.append(Entry(TEACHER, "teacher", card, timed=timed))
            made = how_distilled(card, recipe)
            network = student.model
            models.append(
                Entry.saved(STUDENT, "student", network, folder, baseline, made=made, source=source)
            )
            if recipe.train.trains:
                models.append(Entry.without_distillation(STUDENT))
            chosen = [STUDENT] if outcome.best_step is not None else []
            result = compare(workload.name, scores, chosen=chosen)
            notes = shape_notes(recipe.student)
            contents = workload.report(
                "distill", recipe, models, outcome, result=result, notes=notes
            )
            if self.teacher is not None:
                contents.decisions = decisions(scores, {STUDENT: TEACHER}, chosen=chosen)
            context.report(contents, recipe.measure)

        cards = {}
        if context.dry_run:
            cards[STUDENT] = describe(student.model, str(context.folder), None)
            if card is not None:
                cards = {TEACHER: card, **cards}
        return StageJob(job, schedule, plan.steps_per_pass, finish, cards)

    def _job(self, workload: Workload, student: Model) -> tuple[Job, Schedule]:
        """Return the student's job and its schedule. Without a teacher, the data's scores teach."""
        recipe = self.context.recipe
        if self.teacher is None:
            return workload.job(student, recipe.train, recipe.keep)
        plan = workload.plan(recipe.train)
        targets = workload.targets(
            self.teacher,
            Needs(),
            passes=plan.schedule.steps / plan.steps_per_pass,
            place=StorePlace(self.context.folder / "signals", int(recipe.cache_gb * 1e9)),
            dry_run=self.context.dry_run,
        )
        kd = workload.kd_settings(recipe.kd)
        return taught_job(workload, student, recipe.train, recipe.keep, [targets], kd)


def check_outputs(recipe: DistillRecipe) -> None:
    """Check a recipe before models and data are read.

    Raises UsageError: there is no teacher or no student, or a key is set that such a distillation
        does not read.
    """
    plain = DistillRecipe(task=recipe.task, method=SOFT_TARGETS)
    unread = [name for name in LABELLED_KEYS if getattr(recipe, name) != getattr(plain, name)]
    task = task_title(str(recipe.task))
    if unread:
        raise UsageError(
            f"{task} does not read {', '.join(unread)}: its student learns the outputs of one "
            "teacher",
            "omit them",
        )
    if recipe.teacher is None and recipe.student.source is None:
        raise UsageError(
            "no teacher given",
            f"kdcli distill TEACHER --task {recipe.task} --to LxH --data DIR; or give --student "
            "and scores in the data",
        )
    check_one_student(recipe)


def prepare_outputs(context: RunContext[DistillRecipe]) -> Run:
    """Check models and data of a workload with a module of its own.

    The run directory is not claimed.

    Raises KdcliError: the recipe, a model or the data cannot be used.
    """
    recipe = context.recipe
    source = str(recipe.student.source or recipe.teacher)
    others = [] if recipe.teacher is None else [recipe.teacher]
    request = request_of(as_finetune(recipe, source), source, other_models=others)
    workload, origin = open_workload(request, context.session)
    teacher = None
    if recipe.teacher is None:
        workload.check_given_outputs()
        workload.notes.append(f"the student learned the scores in {recipe.data.source}")
    else:
        if not recipe.train.trains and (misfit := workload.misfit(recipe.teacher)) is not None:
            raise UsageError(
                f"no student can start from {recipe.teacher}: {misfit}",
                "train the student: remove --max-steps 0",
            )
        teacher = workload.load_teacher(recipe.teacher, origin, head=TaskHeadSettings())
        workload.notes.append(f"the teacher is {recipe.teacher}")
    context = with_shape(context, workload, origin)
    recipe = context.recipe
    shape = parse_shape(recipe.student.to[0], origin.shape) if recipe.student.to else origin.shape
    context = with_measured_layers(context, workload, origin, {shape.layers})
    return OutputDistillation(context, workload, teacher, origin, shape).run
