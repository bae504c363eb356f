"""Distil on a task: [text ->] [copies ->] intermediate -> prediction -> undistilled student.

Every stage is a run in its own directory. The prediction stage runs in the output directory itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from kdcli.deploy.latency import Subject
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.losses import build_objective, on_tasks
from kdcli.models.card import describe, describe_source
from kdcli.models.load import load_encoder, location, save_model
from kdcli.models.model import Model
from kdcli.models.shape import set_dropout
from kdcli.models.training_rows import all_rows, training_rows
from kdcli.report.entry import Entry
from kdcli.report.finish import ReportContents, RunResult
from kdcli.report.schema import HELD_OUT_LOSS, STUDENT, TEACHER, UNDISTILLED
from kdcli.run.context import RunContext
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.targets import PrecomputedLogits, StorePlace, delete_signals, store_in
from kdcli.types import (
    Array,
    Card,
    ModelShape,
    Objective,
    Outcome,
    RowHashes,
    Schedule,
    Start,
    task_title,
)
from kdcli.verbs.distill.augment import WordSource, augmented
from kdcli.verbs.distill.fast import how_distilled, shape_notes
from kdcli.verbs.distill.held_out import held_out_losses
from kdcli.verbs.distill.jobs import objective_job, prediction_job
from kdcli.verbs.distill.recipes import stage_settings, undistilled_recipe
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.student import relation_kernel
from kdcli.verbs.distill.text import TextDistillation
from kdcli.workloads.decisions import decisions
from kdcli.workloads.finetuning import WEIGHTS, drop_weights, save_and_report, scores_after_training
from kdcli.workloads.labelled import WORST, LabelledWorkload
from kdcli.workloads.plan import log_padding
from kdcli.workloads.predictions import Features
from kdcli.workloads.recipes import as_finetune
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import FinetuneRecipe
from kdcli.workloads.task_models import row_format

WITHOUT = STUDENT + UNDISTILLED
START_FOLDER, INTERMEDIATE, ALONE = "start", "intermediate", WITHOUT.replace(" ", "-")
"""Directories of a run.

They hold the student before any stage of the task, the method's own stage, and the undistilled
student.
"""


@dataclass
class TaskDistillation:
    """A distillation on a task, checked.

    Attributes:
        context: The run.
        workload: The task, without copies of its examples.
        teachers: The teachers. The method's objective reads the first one. The list is empty if a
            file of soft labels teaches.
        reader: The model whose tokenizer the student has.
        soft_NC: The logits of the training examples from a file, [N, C].
        shape: The student's shape.
        start: The directory of the student before any stage of the task.
        text: The stages on text; None if they are done or not wanted.
        words: The source of other words for copies of examples; None makes no copies.
        trained: The student after the prediction stage, its scores and the outcome.
    """

    context: RunContext[DistillRecipe]
    workload: LabelledWorkload
    teachers: list[Model]
    reader: Model
    soft_NC: Array | None
    shape: ModelShape
    start: Path
    text: TextDistillation | None
    words: WordSource | None
    trained: tuple[Model, ModelScores, Outcome] | None = field(init=False, default=None)

    @property
    def recipe(self) -> DistillRecipe:
        """The recipe of the run."""
        return self.context.recipe

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.context.folder

    @property
    def stage(self) -> str:
        """Where the method's objective is trained: `separate`, `joint` or `none`."""
        if not self.recipe.train.trains:
            return "none"
        return self.recipe.stage or on_tasks(self.recipe.method)[0]

    @property
    def store(self) -> StorePlace | None:
        """Where the teacher's signals are stored while a stage reads them."""
        return None if self.context.dry_run else store_in(self.folder, self.recipe.cache_gb)

    @property
    def has_undistilled(self) -> bool:
        """Whether the student is also trained without a teacher, which needs labels."""
        trains = self.recipe.train.trains
        return self.recipe.undistilled.use and trains and self.workload.has_labels

    @property
    def run(self) -> Run:
        """The run: the stages in order, and the report."""
        resolved = self.context.resolved
        stages = list(self.text.run.stages) if self.text else []
        if self.stage == "separate":
            inside = self.folder / INTERMEDIATE
            stages.append(Stage(inside, resolved, self.build_intermediate))
        stages.append(Stage(self.folder, resolved, self.build_prediction))
        if self.has_undistilled:
            inside = self.folder / ALONE
            alone = undistilled_recipe(self.recipe, self._named_start(inside))
            stages.append(Stage(inside, alone, self.build_undistilled))
        return Run(stages, self.report, resolved)

    @property
    def rows(self) -> RowHashes:
        """The labelled rows that the student and its teachers learned from."""
        return all_rows(self.workload.rows, self.reader.rows, *(t.rows for t in self.teachers))

    def _named_start(self, folder: Path) -> str:
        """Return the path of the student before any stage, as a file in `folder` names it.

        The path is relative if this run made the student, because the run may be moved to another
        machine.
        """
        made_here = self.recipe.student.source is None and self.recipe.general.run is None
        if made_here:
            return Path(os.path.relpath(self.start, folder)).as_posix()
        return str(self.start)

    @cached_property
    def teacher_card(self) -> Card | None:
        """The description of the first teacher."""
        if not self.teachers:
            return None
        return describe_source(self.teachers[0].model, self.teachers[0].source)

    @cached_property
    def teacher_scores(self) -> dict[str, ModelScores]:
        """The first teacher's scores, taken before its weights are cast to the compute dtype."""
        if not self.teachers:
            return {}
        return {TEACHER: self.workload.score(self.teachers[0], worst=WORST)}

    def taught_by(self, workload: LabelledWorkload) -> list[Model | PrecomputedLogits]:
        """Return the teachers of the prediction stage, or the logits from a file."""
        if self.soft_NC is not None:
            return [workload.precomputed(self.soft_NC, None)]
        return list(self.teachers)

    @cached_property
    def augmented(self) -> tuple[LabelledWorkload, list[str]]:
        """The task with copies of its examples, and notes.

        There are no copies in a dry run, or if the recipe asks for none.
        """
        workload = self.workload
        if self.words is None or self.context.dry_run:
            return workload, []
        session, seed = self.context.session, self.recipe.train.seed
        with session.accelerator.main_process_first():
            copies = augmented(
                self.recipe.augment, workload, self.teachers[0], self.words, seed=seed
            )
        Progress.log(*copies.notes)
        task = workload.data.task
        form = row_format(self.recipe.data, task, self.reader)
        features = Features.of(task, copies.examples, self.reader.tokenizer, form)
        return workload.with_examples(features), copies.notes

    @property
    def _init(self) -> str:
        """How the student starts.

        A dry run does not fit a static student, because its size is all that counts.
        """
        skips_fit = self.context.dry_run and self.shape.is_static
        return "random" if skips_fit else self.recipe.student.init

    def objective(self) -> Objective:
        """Build the method's objective, with projections that are drawn from the seed."""
        torch.manual_seed(self.recipe.train.seed)
        teacher = self.teachers[0].shape if self.teachers else self.shape
        session = self.context.session
        kernel = relation_kernel(self.recipe.relation.kernel, session.device, session.compute_dtype)
        return build_objective(
            self.recipe.method, self.recipe.loss, teacher, self.shape, kernel=kernel
        )

    def build_intermediate(self) -> StageJob:
        """Build the stage that trains the method's objective, on the examples and their copies."""
        cards, settings = self._begin("intermediate"), stage_settings(self.recipe)
        with self._student_before() as source:
            encoder = load_encoder(source)
            recipe = as_finetune(self.recipe, source).model_copy(update={"train": settings})
        self._set_dropout(encoder)
        workload, objective = self.augmented[0], self.objective()
        student, job, schedule = objective_job(
            workload, recipe.train, encoder.model, objective, self.teachers[0], self.store
        )
        plan = workload.plan(recipe.train)

        def finish(outcome: Outcome) -> None:
            if not self.context.is_main:
                return
            folder = self.folder / INTERMEDIATE
            rows = all_rows(self.rows, training_rows(location(str(self.start))))
            save_model(student.encoder, self.reader.tokenizer, folder, rows)
            contents = self._contents(folder, Model(student.encoder, self.reader.tokenizer, ""))
            contents.outcome, contents.notes = outcome, list(objective.notes)
            contents.models.append(Entry.without_distillation(STUDENT))
            contents.quality = {HELD_OUT_LOSS: held_out_losses(RunDir(folder), [STUDENT])}
            self.context.report(contents, folder=folder)
            delete_signals(self.folder)

        per_copy = settings.max_steps is None
        schedule, steps = self._steps(schedule, plan.steps_per_pass, per_copy=per_copy)
        log_padding(plan.order)
        return StageJob(job, schedule, steps, finish, cards)

    def build_prediction(self) -> StageJob:
        """Build the stage that trains against the labels and the teachers' logits.

        With stage `joint`, the method's objective is trained too.
        """
        cards, recipe = self._begin("prediction"), self.recipe
        copies, _ = self.augmented
        workload = copies if recipe.augment.predict else self.workload
        if recipe.train.trains:
            before = self.folder / INTERMEDIATE if self.stage == "separate" else None
            with self._student_before(before) as source:
                stage = as_finetune(recipe, source)
                student = self._loaded(source, stage)
            self._set_dropout(student)
        else:
            stage, student = as_finetune(recipe, str(self.folder)), self._fitted(workload)
        if self.context.dry_run:
            cards[STUDENT] = describe(student.model, str(self.folder), None)
        objective = self.objective() if self.stage == "joint" else None
        job, schedule = prediction_job(
            workload,
            stage,
            recipe.kd,
            student,
            self.taught_by(workload),
            objective,
            self.store,
            dry_run=self.context.dry_run,
        )
        plan = workload.plan(recipe.train)

        def finish(outcome: Outcome) -> None:
            scores = scores_after_training(self.workload, student, outcome)
            self.trained = student, scores, outcome

        per_copy = recipe.augment.predict and recipe.train.max_steps is None
        schedule, steps = self._steps(schedule, plan.steps_per_pass, per_copy=per_copy)
        log_padding(plan.order)
        return StageJob(job, schedule, steps, finish, cards)

    def _loaded(self, source: str, recipe: FinetuneRecipe) -> Model:
        """Load the student at the beginning of a stage. A static student starts with its head."""
        new_head = not self.shape.is_static
        return self.workload.load(
            source, head=recipe.head, seed=recipe.train.seed, new_head=new_head
        )

    def _set_dropout(self, student: Model) -> None:
        """Set the dropout rates of a student that learns from the teacher."""
        if self.recipe.student.dropout is not None:
            set_dropout(student.model, self.recipe.student.dropout)

    def _fitted(self, workload: LabelledWorkload) -> Model:
        """Make the student that is not trained. Scoring may have moved its teacher."""
        teacher = self.teachers[0]
        teacher.model.cpu()
        start = Start(self._init, self.recipe.student.copied, seed=self.recipe.train.seed)
        return workload.fitted_student(teacher, self.shape, start)

    def build_undistilled(self) -> StageJob:
        """Build the stage that fine-tunes the same student without a teacher.

        Its score shows whether the distillation was worth it.
        """
        Progress.log(f"run {ALONE}")
        with self._student_before() as source:
            recipe = undistilled_recipe(self.recipe, source).recipe
            model = self._loaded(source, recipe)
        job, schedule = self.workload.job(model, recipe.train, recipe.keep)
        plan = self.workload.plan(recipe.train)
        log_padding(plan.order)

        def finish(outcome: Outcome) -> None:
            inside = self.folder / ALONE
            own = undistilled_recipe(self.recipe, self._named_start(inside)).recipe
            scores = scores_after_training(self.workload, model, outcome)
            save_and_report(
                self.context, self.workload, own, inside, model, scores, outcome, measured=False
            )

        return StageJob(job, schedule, plan.steps_per_pass, finish)

    def report(self) -> None:
        """Save the student and report on all stages."""
        if not self.context.is_main:
            return
        assert self.trained is not None
        recipe, folder = self.recipe, self.folder
        student, scores, outcome = self.trained
        delete_signals(folder)
        self.workload.save(student, folder, all_rows(self.rows, student.rows))
        contents = self._contents(folder, student)
        contents.outcome, contents.auto_class = outcome, self.workload.auto_class
        by_model = {**self.teacher_scores, STUDENT: scores}
        contents.evaluations = [row for name, s in by_model.items() for row in s.rows(name)]
        chosen = [STUDENT] if outcome.best_step is not None else []
        contents.decisions = decisions(by_model, chosen=chosen)
        notes = [*self.workload.notes, *self.augmented[1], *shape_notes(recipe.student)]
        notes += [f"teacher: {teacher.source}" for teacher in self.teachers[1:]]
        if recipe.soft_labels is not None:
            notes.append(
                f"the student learned the soft labels in {recipe.soft_labels}; no teacher was read"
            )
        elif self.teachers and self.reader is not self.teachers[0]:
            notes.append(
                f"{self.reader.source} and its teacher each read the rows with their own tokenizer"
            )
        if recipe.general.use:
            notes.append(f"the student before the task: {self._named_start(folder)}")
        if self.has_undistilled:
            alone = RunResult.read(folder / ALONE).report
            contents.models.append(Entry.without_distillation(STUDENT, "undistilled"))
            contents.evaluations += [
                e.model_copy(update={"model": WITHOUT}) for e in alone.evaluations
            ]
            # Only the scores of this student are needed.
            drop_weights(folder / ALONE)
            notes.append(
                f"{WITHOUT}: started from the same weights and was fine-tuned on the examples "
                "without a teacher"
            )
        contents.notes = notes
        self.context.report(contents, recipe.measure)

    def _begin(self, stage: str) -> dict[str, Card]:
        """Log the stage and score the teacher. A dry run only returns the teacher's card."""
        if self.context.dry_run:
            return {} if self.teacher_card is None else {TEACHER: self.teacher_card}
        Progress.log(f"{self.recipe.method} on {task_title(str(self.recipe.task))}: {stage} stage")
        self.teacher_scores  # noqa: B018
        return {}

    @contextmanager
    def _student_before(self, stage: Path | None = None) -> Iterator[str]:
        """Yield the directory of the student at the beginning of a stage.

        This is the directory of the previous `stage`, by default `start`. In a dry run, a copy of
        the teacher stands in for a student that does not exist yet.
        """
        copied = self.start == self.folder / START_FOLDER
        if self.context.dry_run and (copied or self.text is not None):
            with tempfile.TemporaryDirectory() as aside:
                self._save_copy(Path(aside))
                yield aside
            return
        if copied:
            self.context.session.on_main(lambda: self._save_copy(self.start))
        yield str(self.start if self.context.dry_run else stage or self.start)

    def _save_copy(self, folder: Path) -> None:
        """Save a student that is copied from the teacher, unless the directory holds one."""
        if (folder / WEIGHTS).is_file():
            return
        teacher, student = self.teachers[0], self.recipe.student
        encoder = load_encoder(teacher.source)
        # The stage on text measures the layers of its own student, which a copy only stands in for.
        layers = None if student.layers == "measured" else student.copied
        start = Start(self._init, layers, seed=self.recipe.train.seed)
        built = self.workload.make_student(encoder, self.shape, start)
        for note in built.notes:
            Progress.log(f"{STUDENT}: {note}")
        save_model(built.model, self.reader.tokenizer, folder, teacher.rows)

    def _steps(
        self, schedule: Schedule, steps_per_pass: float, *, per_copy: bool
    ) -> tuple[Schedule, float]:
        """Return a stage's schedule and its steps per pass.

        A dry run makes no copies, but counts their steps if `per_copy` is set.
        """
        augment = self.recipe.augment
        counts = self.context.dry_run and augment.use and per_copy
        times = 1 + augment.copies if counts else 1
        return replace(schedule, steps=times * schedule.steps), times * steps_per_pass

    def _contents(self, folder: Path, student: Model) -> ReportContents:
        """Begin the report of a teacher and its student."""
        models, baseline, source = [], None, None
        if self.teacher_card is not None:
            baseline, source = TEACHER, self.teachers[0].source
            timed = Subject(TEACHER, location(source))
            models.append(Entry(TEACHER, "teacher", self.teacher_card, timed=timed))
        network, made = student.model, how_distilled(self.teacher_card, self.recipe)
        models.append(
            Entry.saved(STUDENT, "student", network, folder, baseline, made=made, source=source)
        )
        return ReportContents("distill", self.recipe, models)
