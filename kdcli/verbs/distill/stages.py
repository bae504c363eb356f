"""The stages of distilling on a task: [text ->] [copies ->] intermediate -> prediction -> the student undistilled.

Every stage is a run in a directory of its own; the prediction stage is the run of the output directory itself.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kdcli.data.batches import BucketOrder
from kdcli.deploy.latency import Latency, Subject
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.losses import build_objective, on_tasks
from kdcli.models.capture import Capture
from kdcli.models.card import describe, describe_source
from kdcli.models.heads import AUTO_CLASS
from kdcli.models.load import load_encoder, location, save_model
from kdcli.models.model import Model
from kdcli.models.shape import build_student, set_dropout, shape_of
from kdcli.models.training_rows import all_rows, training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import KdSettings, RunOptions
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    RunResult,
    measure,
    write_report,
)
from kdcli.report.schema import TEACHER, UNDISTILLED, Evaluation, Quality
from kdcli.run.stages import Stage, StageJob
from kdcli.targets.cache import LOGITS_KEY
from kdcli.targets.task_teacher import (
    GivenLogits,
    Store,
    WithLogits,
    cached_signals,
    delete_signals,
    kd_terms,
    logits_by_own_tokens,
    same_tokens,
    store_in,
)
from kdcli.types import (
    Batch,
    Card,
    Job,
    ModelShape,
    Needs,
    Objective,
    Outcome,
    RowHashes,
    Schedule,
    Signals,
    StepLoss,
)
from kdcli.verbs.distill.augment import WordSource, augmented
from kdcli.verbs.distill.recipes import stage_settings, undistilled_recipe
from kdcli.verbs.distill.settings import TaskDistillRecipe
from kdcli.verbs.distill.student import (
    Student,
    distill_job,
    fit_projections,
    freeze_unreached,
    objective_terms,
    relation_kernel,
)
from kdcli.verbs.distill.text import HELD_OUT, TextRun, held_out_losses
from kdcli.workloads import task as downstream
from kdcli.workloads.predictions import Features
from kdcli.workloads.recipes import as_finetune
from kdcli.workloads.run import WEIGHTS, WORST, drop_weights, finish_claimed
from kdcli.workloads.settings import FinetuneRecipe
from kdcli.workloads.task import PreparedTask, TrainedModel, order_and_schedule, predict, read_by

STUDENT, WITHOUT = "student", f"student{UNDISTILLED}"
START, INTERMEDIATE, ALONE = "start", "intermediate", WITHOUT.replace(" ", "-")
"""Directories of a run: the student before any stage of the task, the method's own stage, and `WITHOUT`."""


@dataclass(frozen=True)
class TaskStage:
    """A stage made of two functions."""

    folder: Path
    resolved: Any
    build: Callable[[], StageJob]
    finish: Callable[[Outcome], None]


@dataclass
class TaskRun:
    """A distillation on a task, checked, and its stages."""

    resolved: Resolved[TaskDistillRecipe]
    invocation: RunOptions
    folder: Path
    task: PreparedTask  # without copies of its examples
    teachers: list[Model]  # the method's objective reads the first; none where a file teaches
    reader: Model  # whose tokenizer the student has
    soft: GivenLogits | None  # of a file
    shape: ModelShape
    start: Path  # directory of the student before any stage of the task
    text: TextRun | None  # the stages on text that are still to be run
    words: WordSource | None  # None makes no copies
    student: Student = field(init=False)  # in training
    headed: Model = field(init=False)  # in training
    trained: TrainedModel = field(init=False)  # of the prediction stage

    def __post_init__(self) -> None:
        self.recipe, self.session = self.resolved.recipe, self.task.session
        self.stage = self.recipe.stage or on_tasks(self.recipe.method)[0]
        self.store = (
            None if self.invocation.dry_run else store_in(self.folder, self.recipe.cache_gb)
        )

    @property
    def stages(self) -> list[Stage]:
        stages: list[Stage] = [*self.text.stages] if self.text else []
        if self.stage == "separate":
            first = self.build_intermediate, self.finish_intermediate
            stages.append(TaskStage(self.folder / INTERMEDIATE, self.resolved, *first))
        stages.append(
            TaskStage(self.folder, self.resolved, self.build_prediction, self.finish_prediction)
        )
        if self.recipe.undistilled.use:
            inside = self.folder / ALONE
            resolved = undistilled_recipe(self.recipe, self._named_start(inside))
            stages.append(
                TaskStage(inside, resolved, self.build_undistilled, self.finish_undistilled)
            )
        return stages

    @property
    def rows(self) -> RowHashes:
        """The labelled rows that the student learns from: the task's, and those of its teachers."""
        return all_rows(
            self.task.data.rows, self.reader.rows, *(teacher.rows for teacher in self.teachers)
        )

    def _named_start(self, folder: Path) -> str:
        """The student before any stage, as a file in `folder` names it: relative if this run made it, since the run may
        move to another machine, else as it was given."""
        made = self.recipe.student.source is None and self.recipe.general.run is None
        return Path(os.path.relpath(self.start, folder)).as_posix() if made else str(self.start)

    @cached_property
    def teacher_cards(self) -> dict[str, Card]:
        if not self.teachers:
            return {}
        teacher = self.teachers[0]
        return {TEACHER: describe_source(teacher.model, teacher.source)}

    @cached_property
    def teacher_evaluations(self) -> list[Evaluation]:
        """The teacher's scores, taken before its weights are cast to the compute dtype."""
        rows: list[Evaluation] = []
        for teacher in self.teachers[:1]:
            evaluator = self.task.evaluator
            if not same_tokens(teacher.tokenizer, self.reader.tokenizer):
                evaluator = read_by(self.task, self.recipe.data, teacher).evaluator
            predictions = predict(self.session, evaluator, teacher)
            rows += evaluator.evaluations(TEACHER, self.task.data.split, predictions, WORST)
        return rows

    def taught_by(self, task: PreparedTask) -> list[Model | GivenLogits]:
        """The teachers of the prediction stage: those that read the student's tokens, and logits of the others."""
        if self.soft is not None:
            return [self.soft]
        return [
            t
            if same_tokens(t.tokenizer, self.reader.tokenizer)
            else logits_by_own_tokens(t, task, self.recipe.data, self.store)
            for t in self.teachers
        ]

    @cached_property
    def augmented(self) -> tuple[PreparedTask, list[str]]:
        """The task with copies of its examples, if the recipe wants them, and notes; a dry run makes none."""
        task = self.task
        if self.words is None or self.invocation.dry_run:
            return task, []
        teacher = self.teachers[0]
        with self.session.accelerator.main_process_first():
            made = augmented(
                self.recipe.augment, task, teacher, self.words, seed=self.recipe.train.seed
            )
        Progress.log(*made.notes)
        how = downstream.features_of(self.recipe.data, task.data.task, self.reader)
        return replace(
            task, train=Features.of(task.data.task, made.examples, self.reader.tokenizer, **how)
        ), made.notes

    def objective(self) -> Objective:
        """The method's objective, its projections drawn from the seed."""
        torch.manual_seed(self.recipe.train.seed)
        teacher = shape_of(self.teachers[0].model.config) if self.teachers else self.shape
        kernel = relation_kernel(
            self.recipe.relation.kernel, self.session.device, self.session.compute_dtype
        )
        return build_objective(
            self.recipe.method, self.recipe.loss, teacher, self.shape, kernel=kernel
        )

    def build_intermediate(self) -> StageJob:
        """The method's objective alone, on the examples and their copies."""
        cards, settings = self._begin("intermediate"), stage_settings(self.recipe)
        with self._student_before() as source:
            encoder = load_encoder(source, trust_remote_code=self.session.trust_remote_code).model
            recipe = as_finetune(self.recipe, source).model_copy(update={"train": settings})
        if self.recipe.student.dropout is not None:
            set_dropout(encoder, self.recipe.student.dropout)
        task, teacher = self.augmented[0], self.teachers[0]
        self.student, job, schedule = intermediate_job(
            task, recipe, encoder, self.objective(), teacher, self.store
        )
        return self._stage_job(job, schedule, cards, per_copy=settings.max_steps is None)

    def finish_intermediate(self, outcome: Outcome) -> None:
        folder, encoder, notes = (
            self.folder / INTERMEDIATE,
            self.student.encoder,
            self.student.objective.notes,
        )
        del self.student
        if not self.session.is_main:
            return
        rows = all_rows(self.rows, training_rows(location(str(self.start))))
        save_model(encoder, self.reader.tokenizer, folder, rows)
        quality = {HELD_OUT: held_out_losses(RunDir(folder), [STUDENT])}
        self._write(folder, encoder, outcome, list(notes), quality=quality)
        delete_signals(self.folder)

    def build_prediction(self) -> StageJob:
        """The labels and the teachers' logits; with stage `joint` the method's objective too."""
        cards, recipe = self._begin("prediction"), self.recipe
        copies, _ = self.augmented
        task = copies if recipe.augment.predict else self.task
        with self._student_before(
            self.folder / INTERMEDIATE if self.stage == "separate" else None
        ) as source:
            stage = as_finetune(recipe, source)
            self.headed = task.load(stage)
        if self.invocation.dry_run:
            cards[STUDENT] = describe(self.headed.model, str(self.folder), None)
        objective = self.objective() if self.stage == "joint" else None
        taught = self.taught_by(task)
        job, schedule = prediction_job(
            task, stage, recipe.kd, self.headed, taught, objective, self.store
        )
        per_copy = recipe.augment.predict and recipe.train.max_steps is None
        return self._stage_job(job, schedule, cards, per_copy=per_copy)

    def finish_prediction(self, outcome: Outcome) -> None:
        self.trained = downstream.trained_model(self.task, self.headed, outcome)

    def build_undistilled(self) -> StageJob:
        """The same student fine-tuned without a teacher: its score shows whether distillation was worth it."""
        Progress.log(f"run {ALONE}")
        with self._student_before() as source:
            recipe = undistilled_recipe(self.recipe, source).recipe
            self.headed = self.task.load(recipe)
        return self._stage_job(
            *downstream.build_job(self.task, recipe, self.headed), {}, per_copy=False
        )

    def finish_undistilled(self, outcome: Outcome) -> None:
        recipe = undistilled_recipe(self.recipe, self._named_start(self.folder / ALONE)).recipe
        trained = downstream.trained_model(self.task, self.headed, outcome)
        finish_claimed(self.task, recipe, self.folder / ALONE, trained, timed=False)

    def report(self) -> None:
        if not self.session.is_main:
            return
        recipe, folder, headed = self.recipe, self.folder, self.trained.headed
        delete_signals(folder)
        save_model(headed.model, headed.tokenizer, folder, all_rows(self.rows, headed.rows))
        evaluate, split = self.task.evaluator.evaluations, self.task.data.split
        evaluations = self.teacher_evaluations + evaluate(
            STUDENT, split, self.trained.predictions, WORST
        )
        notes = [
            *self.task.notes,
            *self.augmented[1],
            *(f"teacher: {t.source}" for t in self.teachers[1:]),
        ]
        if recipe.soft_labels is not None:
            notes.append(
                f"the student learnt the soft labels in {recipe.soft_labels}; no teacher was read"
            )
        if self.teachers and self.reader is not self.teachers[0]:
            notes.append(
                f"{self.reader.source} and its teacher read the rows each with its own tokenizer"
            )
        if recipe.general.use:
            notes.append(f"the student before the task: {self._named_start(folder)}")
        if recipe.undistilled.use:
            alone = RunResult.read(folder / ALONE).report.evaluations
            evaluations += [e.model_copy(update={"model": WITHOUT}) for e in alone]
            # Only its scores are wanted.
            drop_weights(folder / ALONE)
            notes.append(
                f"{WITHOUT}: started from the same weights, fine-tuned on the examples without a teacher"
            )
        subjects = [Subject(TEACHER, location(t.source)) for t in self.teachers[:1]] + [
            Subject(STUDENT, str(folder))
        ]
        self._write(
            folder,
            headed.model,
            self.trained.outcome,
            notes,
            latency=measure(subjects, recipe.measure, self.session),
            evaluations=evaluations,
            auto_class=AUTO_CLASS[self.task.data.task.kind].__name__,
        )

    def _begin(self, stage: str) -> dict[str, Card]:
        """Log the stage and score the teacher; in a dry run, the teacher's card."""
        if self.invocation.dry_run:
            return dict(self.teacher_cards)
        Progress.log(f"{self.recipe.method} on {self.recipe.task}: {stage} stage")
        self.teacher_evaluations  # noqa: B018
        return {}

    @contextmanager
    def _student_before(self, stage: Path | None = None) -> Iterator[str]:
        """Directory of the student at the beginning of a stage: of the `stage` before it, else `start`. In a dry run a
        copy of the teacher stands in for a student that is not there."""
        copied = self.start == self.folder / START
        if self.invocation.dry_run and (copied or self.text is not None):
            with tempfile.TemporaryDirectory() as aside:
                self._save_copy(Path(aside))
                yield aside
            return
        if copied:
            self.session.in_main(lambda: self._save_copy(self.start))
        yield str(self.start if self.invocation.dry_run else stage or self.start)

    def _save_copy(self, folder: Path) -> None:
        if (folder / WEIGHTS).is_file():
            return
        teacher, how = (
            self.teachers[0],
            self.recipe.student.model_dump(include={"init", "layers"}),
        )
        model = load_encoder(teacher.source, trust_remote_code=self.session.trust_remote_code).model
        text = self.task.train.rows if self.task.train else None
        built = build_student(model, self.shape, text=text, seed=self.recipe.train.seed, **how)
        for note in built.notes:
            Progress.log(f"{STUDENT}: {note}")
        save_model(built.model, self.reader.tokenizer, folder, teacher.rows)

    def _stage_job(
        self, job: Job, schedule: Schedule, cards: dict[str, Card], *, per_copy: bool
    ) -> StageJob:
        """A stage's job; a dry run makes no copies but counts their steps if `per_copy`."""
        assert isinstance(job.order, BucketOrder)
        augment = self.recipe.augment
        times = 1 + augment.copies if self.invocation.dry_run and augment.use and per_copy else 1
        downstream.log_padding(job.order)
        return StageJob(
            job,
            replace(schedule, steps=times * schedule.steps),
            times * job.order.steps_of_pass,
            cards,
        )

    def _write(
        self,
        folder: Path,
        student: PreTrainedModel,
        outcome: Outcome,
        notes: list[str],
        *,
        latency: Latency | None = None,
        evaluations: Sequence[Evaluation] = (),
        quality: Quality | None = None,
        auto_class: str = "AutoModel",
    ) -> None:
        models = [ReportedModel(n, "teacher", card) for n, card in self.teacher_cards.items()]
        card, baseline = describe(student, str(folder), folder), models[0].name if models else None
        models.append(ReportedModel(STUDENT, "student", card, baseline, folder))
        contents = ReportContents(
            "distill",
            self.recipe,
            models,
            outcome=outcome,
            latency=latency or Latency(),
            evaluations=list(evaluations),
            quality=quality,
            notes=notes,
            auto_class=auto_class,
        )
        write_report(RunDir(folder), contents)


def intermediate_job(
    task: PreparedTask,
    recipe: FinetuneRecipe,
    encoder: PreTrainedModel,
    objective: Objective,
    teacher: Model,
    store: Store | None,
) -> tuple[Student, Job, Schedule]:
    """The objective alone, on the task's rows, by the `train:` of `recipe`; labels are ignored."""
    assert task.train is not None
    # The evaluation of the teacher has moved it to the device.
    fit_projections(objective, teacher.model.cpu(), encoder, task.train.rows)
    student = Student(encoder, objective)
    freeze_unreached({STUDENT: student}, teacher.model, task.train.rows.batch(np.arange(1)))
    order, schedule = order_and_schedule(task, recipe)
    signals = cached_signals(
        teacher, task, objective.teacher_needs, schedule.steps / order.steps_of_pass, store
    )
    job = distill_job(
        {STUDENT: student}, signals.signals, signals.examples, order, task.evaluator.features.rows
    )
    return student, job, schedule


def prediction_job(
    task: PreparedTask,
    recipe: FinetuneRecipe,
    kd: KdSettings,
    headed: Model,
    teachers: Sequence[Model | GivenLogits],
    objective: Objective | None,
    store: Store | None,
) -> tuple[Job, Schedule]:
    """The loss against labels and the teachers' logits, plus an objective against the first teacher if there is one.
    `headed`: the student with the task's head. `store`: for one teacher; several are not cached. `GivenLogits` are
    read with the rows; without those of the judged rows, their held-out loss is the labels' alone."""
    plain, schedule = downstream.build_job(task, recipe, headed)
    kind, captured = task.data.task.kind, plain.modules["model"]
    assert isinstance(captured, Capture)
    assert task.train is not None
    modules, first_needs = dict(plain.modules), Needs(logits=True)
    if objective is not None:
        captured.needs = captured.needs | objective.student_needs
        first_needs = first_needs | objective.teacher_needs
        if any(True for _ in objective.projections.parameters()):
            modules["projections"] = objective.projections
            assert isinstance(teachers[0], Model)
            fit_projections(objective, teachers[0].model.cpu(), headed.model.cpu(), task.train.rows)
    if not kd.weight and objective is None:
        teachers = []  # Nothing is learned from them.
    order, _ = order_and_schedule(task, recipe)
    passes, store = schedule.steps / order.steps_of_pass, store if len(teachers) == 1 else None
    needs = [first_needs, *[Needs(logits=True)] * (len(teachers) - 1)][: len(teachers)]
    examples, held_out = plain.examples, plain.held_out
    sources: list[Callable[[Batch], Signals | None]] = []
    for teacher, needed in zip(teachers, needs, strict=True):
        if isinstance(teacher, Model):
            cached = cached_signals(teacher, task, needed, passes, store)
            sources.append(cached.signals)
            examples = cached.examples
    for number, teacher in enumerate(teachers):
        if isinstance(teacher, GivenLogits):
            key, judged = f"{LOGITS_KEY}.{number}", task.evaluator.features.rows
            examples = WithLogits(examples, teacher.train_NC[task.train.rows.example], key)
            if teacher.judged_NC is not None and held_out is not None:
                held_out = WithLogits(held_out, teacher.judged_NC[judged.example], key)
            sources.insert(number, partial(given_signals, key))

    def step(batch: Batch) -> StepLoss:
        # First, because it takes the cached signals out of the batch, which no model reads.
        found = [source(batch) for source in sources] if "labels" in batch else []
        signals = [one for one in found if one is not None]
        loss, student = downstream.task_loss(kind, captured, batch)
        terms = dict(kd_terms(kind, kd, loss, student, signals))
        if objective is not None and signals:
            terms |= objective_terms(objective, signals[0], student)
        return StepLoss(terms, student.logits)

    return replace(
        plain, modules=modules, step=step, examples=examples, held_out=held_out
    ), schedule


def given_signals(key: str, batch: Batch) -> Signals | None:
    """The logits that `WithLogits` put into a batch, if any."""
    logits = batch.pop(key, None)
    if logits is None:
        return None
    return Signals(mask=batch["attention_mask"], labels=batch.get("labels"), logits=logits)
