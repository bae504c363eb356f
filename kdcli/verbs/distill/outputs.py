"""Distil a model's outputs: the teacher's outputs, once -> a smaller model -> report.

This serves rerankers and every other workload that has no distillation of its own. The student is
a whole model. It learns the teacher's outputs and the labels, and is compared with its teacher and
with itself before training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdcli.deploy.latency import Subject
from kdcli.errors import UsageError
from kdcli.models.card import describe, describe_source
from kdcli.models.cross_encoder import set_activation
from kdcli.models.grammar import parse_shape
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.models.shape import set_dropout
from kdcli.models.training_rows import all_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import KdSettings, MeasureSettings, RunOptions, Section
from kdcli.report.entry import Entry
from kdcli.report.finish import ReportContents, RunResult
from kdcli.report.schema import STUDENT, TEACHER, UNDISTILLED
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, Stage, StageJob, run_command
from kdcli.targets.targets import StorePlace
from kdcli.types import Job, Needs, Outcome, Schedule, Start, task_title
from kdcli.verbs.distill.fast import (
    check_goal,
    check_untrained,
    how_distilled,
    shape_notes,
    with_shape,
)
from kdcli.verbs.distill.layers import start_of, with_measured_layers
from kdcli.verbs.distill.recipes import SOFT_TARGETS
from kdcli.verbs.distill.settings import StudentSettings, TaskDistillRecipe
from kdcli.workloads import open_workload
from kdcli.workloads.decisions import decisions
from kdcli.workloads.finetuning import request_of, scores_after_training
from kdcli.workloads.plan import log_padding
from kdcli.workloads.recipes import as_finetune, rerank_finetuning
from kdcli.workloads.rerank import RerankWorkload
from kdcli.workloads.rerank_models import activation_taught_by
from kdcli.workloads.scores import ModelScores, compare
from kdcli.workloads.settings import (
    FinetuneTrainSettings,
    RerankRecipe,
    RerankStudentSettings,
    TaskHeadSettings,
)
from kdcli.workloads.training import Keep, taught_job
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
        teacher: The teacher; None if the data hold its scores.
        make: Makes the student, with the same weights each time.
        recipe: The recipe for the report.
        train: How the student is trained.
        keep: Which weights are kept, the best or the last.
        kd: How the teacher's outputs are weighted against the labels.
        measure: How latency is measured.
        place: Where the teacher's signals may be stored.
        student: The recipe's `student` section.
    """

    context: RunContext[Section]
    workload: Workload
    teacher: Model | None
    make: Callable[[], Model]
    recipe: Section
    train: FinetuneTrainSettings
    keep: Keep
    kd: KdSettings
    measure: MeasureSettings
    place: StorePlace
    student: StudentSettings | RerankStudentSettings

    @property
    def run(self) -> Run:
        """The run, which has one stage."""
        resolved = self.context.resolved
        return Run([Stage(self.context.folder, resolved, self.build)], resolved=resolved)

    def build(self) -> StageJob:
        """Compute the teacher's outputs, make the student, and build the job that trains it."""
        workload, context = self.workload, self.context
        student = self.make()
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
        plan = workload.plan(self.train)
        log_padding(plan.order)

        def finish(outcome: Outcome) -> None:
            scores[STUDENT] = scores_after_training(workload, student, outcome)
            if self.train.trains:
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
            made = how_distilled(card, self.recipe, trains=self.train.trains)
            network = student.model
            models.append(
                Entry.saved(STUDENT, "student", network, folder, baseline, made=made, source=source)
            )
            if self.train.trains:
                models.append(Entry.without_distillation(STUDENT))
            chosen = [STUDENT] if outcome.best_step is not None else []
            result = compare(workload.name, scores, chosen=chosen)
            contents = ReportContents("distill", self.recipe, models, outcome=outcome)
            contents.evaluations, contents.comparisons = result.evaluations, result.comparisons
            if self.teacher is not None:
                contents.decisions = decisions(scores, {STUDENT: TEACHER}, chosen=chosen)
            contents.notes = [*workload.notes, *shape_notes(self.student)]
            contents.auto_class, contents.pipeline = workload.auto_class, workload.pipeline
            context.report(contents, self.measure)

        cards = {}
        if context.dry_run:
            cards[STUDENT] = describe(student.model, str(context.folder), None)
            if card is not None:
                cards = {TEACHER: card, **cards}
        return StageJob(job, schedule, plan.steps_per_pass, finish, cards)

    def _job(self, workload: Workload, student: Model) -> tuple[Job, Schedule]:
        """Return the student's job and its schedule. Without a teacher, the data's scores teach."""
        if self.teacher is None:
            return workload.job(student, self.train, self.keep)
        plan = workload.plan(self.train)
        passes = plan.schedule.steps / plan.steps_per_pass
        targets = workload.targets(
            self.teacher,
            Needs(),
            passes=passes,
            place=self.place,
            dry_run=self.context.dry_run,
        )
        return taught_job(workload, student, self.train, self.keep, [targets], self.kd)


def distill_reranker(
    resolved: Resolved[RerankRecipe], options: RunOptions
) -> RunResult | Estimate | None:
    """Distil a reranker, score it and report; see `run_command` for what it returns.

    Raises KdcliError: the recipe, a model or the data cannot be used, or the run fails.
    """
    recipe = resolved.recipe
    if recipe.teacher is None and recipe.student.source is None:
        raise UsageError(
            "no teacher given",
            "kdcli distill TEACHER --task rerank --to LxH --data DIR; or give --student and "
            "scores in the data",
        )
    if recipe.student.to is None and recipe.student.source is None:
        raise UsageError(
            "no student given", "add --to LxH, for example --to 3x384, or --student DIR"
        )
    check_untrained(recipe)
    if recipe.data.source is None:
        raise UsageError(
            "task rerank needs --data", "a file or directory of queries with their passages"
        )
    name = Path(str(recipe.teacher or recipe.student.source)).name
    check_goal(recipe)
    run_name = f"distill-{name}-rerank-{recipe.student.to or 'student'}"
    return run_command(resolved, options, run_name, _prepare_reranker)


def _prepare_reranker(context: RunContext[RerankRecipe]) -> Run:
    """Check models and data, without claiming the run directory."""
    recipe = context.recipe
    generic = rerank_finetuning(recipe)
    workload, origin = open_workload(request_of(generic, str(generic.model)), context.session)
    assert isinstance(workload, RerankWorkload)
    lists = workload.train
    assert lists is not None
    if recipe.teacher is None and not workload.scored:
        unscored = int(np.isnan(lists.scores).sum())
        raise UsageError(
            f"{unscored:,} of {len(lists.passages):,} training passages have no score",
            "name a teacher, or train on the labels alone with kdcli finetune MODEL --task rerank",
        )
    teacher = None
    if recipe.teacher is not None:
        if not recipe.train.trains and workload.misfit(recipe.teacher) is not None:
            raise UsageError(
                f"{recipe.teacher} has no reranking head that a student could start from",
                "train the student: remove --max-steps 0",
            )
        teacher = workload.load_teacher(recipe.teacher, origin, head=TaskHeadSettings())
        workload.notes = [f"the teacher is {recipe.teacher}"]
    else:
        workload.notes = [f"the student learned the scores in {recipe.data.source}"]
    context = with_shape(context, workload, origin)
    recipe = context.recipe
    student, full = recipe.student, origin.shape
    shape = full if student.to is None else parse_shape(student.to, full)

    def make() -> Model:
        make_student = workload.student if recipe.train.trains else workload.fitted_student
        start = Start(student.init, student.layers, seed=recipe.train.seed)
        made = make_student(origin, shape, start)
        if teacher is not None:
            set_activation(made.model, activation_taught_by(teacher))
        return made

    place = StorePlace(context.folder, int(recipe.cache_gb * 1e9))
    kd = KdSettings(weight=recipe.ranking.weight, temperature=recipe.ranking.temperature)
    return OutputDistillation(
        context,
        workload,
        teacher,
        make,
        recipe,
        recipe.train,
        recipe.keep,
        kd,
        recipe.measure,
        place,
        student,
    ).run


def check_outputs(recipe: TaskDistillRecipe) -> None:
    """Check the recipe for a workload with a module of its own, which only learns outputs.

    Raises UsageError: a key is set that such a distillation does not read.
    """
    plain = TaskDistillRecipe(method=SOFT_TARGETS)
    unread = [name for name in LABELLED_KEYS if getattr(recipe, name) != getattr(plain, name)]
    if unread:
        raise UsageError(
            f"{task_title(str(recipe.task))} does not read {', '.join(unread)}: its student learns "
            "the outputs of one teacher",
            "omit them; the weight of the outputs is kd.weight",
        )


def prepare_outputs(context: RunContext[TaskDistillRecipe]) -> Run:
    """Check models and data of a workload with a module of its own.

    The run directory is not claimed.

    Raises KdcliError: the recipe, a model or the data cannot be used.
    """
    recipe = context.recipe
    source = str(recipe.student.source or recipe.teacher)
    request = request_of(as_finetune(recipe, source), source, other_models=[str(recipe.teacher)])
    workload, origin = open_workload(request, context.session)
    teacher = workload.load_teacher(str(recipe.teacher), origin, head=TaskHeadSettings())
    context = with_shape(context, workload, origin)
    recipe = context.recipe
    shape = parse_shape(recipe.student.to[0], origin.shape) if recipe.student.to else origin.shape
    context = with_measured_layers(context, workload, origin, {shape.layers})
    recipe, student = context.recipe, context.recipe.student

    def make() -> Model:
        make_student = workload.student if recipe.train.trains else workload.fitted_student
        made = make_student(origin, shape, start_of(student, recipe.train.seed))
        # The student was saved and loaded again, with its teacher's rates.
        if student.dropout is not None:
            set_dropout(made.model, student.dropout)
        return made

    place = StorePlace(context.folder / "signals", int(recipe.cache_gb * 1e9))
    return OutputDistillation(
        context,
        workload,
        teacher,
        make,
        recipe,
        recipe.train,
        recipe.keep,
        recipe.kd,
        recipe.measure,
        place,
        student,
    ).run
