"""Distil on a task: [text ->] [copies ->] intermediate -> prediction -> undistilled student.

Every stage is a run in its own directory. The prediction stage runs in the output directory itself.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from kdcli.engine.run_dir import RunDir
from kdcli.losses import on_tasks
from kdcli.messages import log
from kdcli.models.capture import Capture
from kdcli.models.layout import check_relations
from kdcli.models.load import load_encoder, location, save_model
from kdcli.models.model import Model, all_rows, training_rows
from kdcli.models.shape import set_dropout
from kdcli.recipe.sections import KdSettings, TrainSettings
from kdcli.report.finish import Entry, ReportContents, RunResult
from kdcli.report.schema import HELD_OUT_LOSS, STUDENT, TEACHER, UNDISTILLED
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.cache import LOGITS_KEY, StorePlace
from kdcli.targets.targets import (
    PrecomputedLogits,
    Targets,
    delete_signals,
    store_in,
)
from kdcli.types import (
    Array,
    Job,
    ModelShape,
    Needs,
    Objective,
    Outcome,
    Schedule,
    Start,
    task_title,
)
from kdcli.verbs.distill.augment import WordSource, augmented
from kdcli.verbs.distill.distill_recipes import stage_settings, undistilled_recipe
from kdcli.verbs.distill.distillation import Distillation, held_out_losses, objective_job, start_of
from kdcli.verbs.distill.fast import shape_notes
from kdcli.verbs.distill.student import (
    Student,
    family_job,
    fit_projections,
    objective_of,
    objective_terms,
)
from kdcli.workloads.decisions import decisions
from kdcli.workloads.finetuning import (
    WEIGHTS,
    drop_weights,
    learning_notes,
    save_and_report,
    scores_after_training,
    with_trivial_answer,
)
from kdcli.workloads.labelled import WORST, LabelledWorkload
from kdcli.workloads.predictions import Features
from kdcli.workloads.scores import EvaluationResult, ModelScores, compare
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.task_models import row_format
from kdcli.workloads.training import Keep, log_padding, taught_job
from kdcli.workloads.workload import Workload

WITHOUT = STUDENT + UNDISTILLED
START_FOLDER, INTERMEDIATE, ALONE = "start", "intermediate", WITHOUT.replace(" ", "-")
"""Directories of a run.

They hold the student before any stage of the task, the method's own stage, and the undistilled
student.
"""


@dataclass(eq=False)
class OutputDistillation(Distillation):
    """A student that learns the labels and the teachers' outputs, with the head of its data.

    It is compared with its teacher and with itself before training. Members of a family share the
    head, too.

    Attributes:
        scores: The scores of the models by name.
        trained: The student, or the members of a family, after training, and the outcome.
    """

    scores: dict[str, ModelScores] = field(init=False, default_factory=dict)
    trained: tuple[Mapping[str, Model], Outcome] | None = field(init=False, default=None)

    @property
    def largest(self) -> str:
        """The name of the student, or of the largest member of a family."""
        return max(self.students, key=lambda name: self.students[name].shape.layers)

    @property
    def shape(self) -> ModelShape:
        """The shape of the student, or of the largest member of a family."""
        return self.students[self.largest].shape

    def with_members(self, student: Model) -> dict[str, Model]:
        """Return the student, or the members of a family, given the largest one."""
        networks = self.members(student.model)
        return {name: replace(student, model=network) for name, network in networks.items()}

    @property
    def stages(self) -> list[Stage]:
        """The stages in order."""
        return [Stage(self.folder, self.context.resolved, self.build)]

    @property
    def run(self) -> Run:
        """The run: the stages in order, and the report."""
        return Run(self.stages, self.report, self.context.resolved)

    @property
    def store(self) -> StorePlace | None:
        """Where the teacher's signals are stored while a stage reads them."""
        return None if self.context.dry_run else store_in(self.folder, self.recipe.cache_gb)

    @property
    def train_workload(self) -> Workload:
        """The data with the rows to train on."""
        return self.workload

    def begin(self, stage: str) -> None:
        """Score the first teacher in float32, before a stage casts it to the compute dtype."""
        if not self.teachers or TEACHER in self.scores:
            return
        if self.workload.needs_reference:
            self.workload = self.workload.with_reference(self.teachers[0])
        if self.context.dry_run:
            return
        self.scores[TEACHER] = self.workload.score(self.teachers[0], worst=WORST)

    def make(self) -> Model:
        """Make the student, with the same weights each time."""
        recipe, workload = self.recipe, self.workload
        make_student = workload.student if recipe.train.trains else workload.fitted_student
        made: Model = make_student(
            self.origin, self.shape, start_of(recipe.student, self.shape.layers, recipe.train.seed)
        )
        # The student was saved and loaded again, with its teacher's rates.
        self.set_dropout(made)
        if self.teachers:
            workload.adapt_student(made, self.teachers[0])
        return made

    def set_dropout(self, student: Model) -> None:
        """Set the dropout rates of a student that learns from the teacher."""
        if self.recipe.student.dropout is not None:
            set_dropout(student.model, self.recipe.student.dropout)

    def taught_by(self, workload: Workload) -> Sequence[Model | PrecomputedLogits]:
        """Return the teachers of some rows, or logits from a file."""
        return self.teachers

    def joint_objectives(self) -> Mapping[str, Objective]:
        """Return the objective on the teacher's states that is added to a student's loss."""
        return {}

    def steps(
        self, schedule: Schedule, steps_per_pass: float, *, per_copy: bool
    ) -> tuple[Schedule, float]:
        """Return a stage's schedule and its steps per pass.

        A dry run makes no copies, but counts their steps if `per_copy` is set.
        """
        augment = self.recipe.augment
        counts = self.context.dry_run and augment.use and per_copy
        times = 1 + augment.copies if counts else 1
        return replace(schedule, steps=times * schedule.steps), times * steps_per_pass

    def build(self) -> StageJob:
        """Build the stage that trains against the labels and the teachers' outputs."""
        self.begin("prediction")
        recipe, workload = self.recipe, self.train_workload
        students = self.with_members(self.make())
        cards = self.cards({name: student.model for name, student in students.items()})
        train, keep = recipe.train, recipe.keep
        if teachers := self.taught_by(workload):
            job = prediction_job(
                workload,
                train,
                keep,
                workload.kd_settings(recipe.kd),
                students,
                teachers,
                self.joint_objectives(),
                self.store,
                dry_run=self.context.dry_run,
            )
        else:
            # The data's scores teach.
            jobs = {n: workload.job(student, train, keep)[0] for n, student in students.items()}
            depths = {name: student.shape.layers for name, student in students.items()}
            job = family_job(jobs, depths)
        if recipe.student.init != "random" and len(students) == 1:
            # A few steps may be worse than none. Of a family, the largest member's score chooses.
            job = replace(job, best_from=0)
        plan = workload.plan(train)
        log_padding(plan.order)
        per_copy = recipe.augment.predict and train.max_steps is None
        schedule, steps = self.steps(plan.schedule, plan.steps_per_pass, per_copy=per_copy)
        return StageJob(job, schedule, steps, partial(self._finish, students), cards)

    def _finish(self, students: Mapping[str, Model], outcome: Outcome) -> None:
        for name, student in students.items():
            # The outcome has the outputs of the largest.
            own = outcome if name == self.largest else replace(outcome, outputs=None)
            self.scores[name] = scores_after_training(self.workload, student, own)
        self.trained = students, outcome

    def score_untrained(self) -> None:
        """Score the student before its training."""
        if self.recipe.train.trains:
            for name, student in self.with_members(self.make()).items():
                self.scores[name + UNDISTILLED] = self.workload.score(student)

    def result(self, chosen: Sequence[str]) -> EvaluationResult:
        """Return the scores and comparisons of the report; `chosen` are as in `compare`."""
        return compare(self.workload.name, self.scores, chosen=chosen)

    def without(self) -> list[Entry]:
        """Name the student without its distillation."""
        names = self.students if self.recipe.train.trains else ()
        return list(map(Entry.without_distillation, names))

    def notes(self) -> list[str]:
        """Return the notes of the report, besides the notes on the data."""
        notes: list[str] = []
        for name in self.students:
            title = "the student" if name == STUDENT else f"the {name}"
            notes += learning_notes(title, self.scores[name].evaluations, RunDir(self.folder))
        return [*notes, *shape_notes(self.recipe.student)]

    def report(self) -> None:
        """Save the student and report on all stages."""
        assert self.trained is not None
        students, outcome = self.trained
        self.score_untrained()
        if not self.context.is_main:
            return
        delete_signals(self.folder)
        for name, student in students.items():
            scores = self.scores[name]
            self.scores[name] = with_trivial_answer(self.workload, student, scores)
            folder = self.model_folder(name)
            self.workload.save(student, folder, all_rows(self.rows, student.rows))
        networks = {name: student.model for name, student in students.items()}
        models = [*self.entries(networks), *self.without()]
        chosen = list(students) if outcome.best_step is not None else []
        contents = self.workload.report(
            "distill",
            self.recipe,
            models,
            outcome,
            result=self.result(chosen),
            notes=self.notes(),
        )
        if TEACHER in self.scores:
            compared = {name: self.scores[name] for name in (TEACHER, *students)}
            contents.decisions = decisions(compared, chosen=chosen)
        self.context.report(contents, self.recipe.measure)


@dataclass(eq=False)
class TaskDistillation(OutputDistillation):
    """A distillation on labelled rows, with the stages before and after the prediction stage.

    Attributes:
        soft_NC: The logits of the training examples from a file, [N, C].
        start: The directory of the student before any stage of the task.
        text: The stages on text; None if they are done or not wanted.
        words: The source of other words for copies of examples; None makes no copies.
    """

    workload: LabelledWorkload
    soft_NC: Array | None
    start: Path
    text: Run | None
    words: WordSource | None

    @property
    def stage(self) -> str:
        """Where the method's objective is trained: `separate`, `joint` or `none`."""
        if not self.recipe.train.trains:
            return "none"
        return self.recipe.stage or on_tasks(self.recipe.method)[0]

    @property
    def has_undistilled(self) -> bool:
        """Whether the student is also trained without a teacher, which needs labels."""
        trains = self.recipe.train.trains
        return self.recipe.undistilled.use and trains and self.workload.has_labels

    @property
    def stages(self) -> list[Stage]:
        resolved = self.context.resolved
        stages = list(self.text.stages) if self.text else []
        if self.stage == "separate":
            inside = self.folder / INTERMEDIATE
            stages.append(Stage(inside, resolved, self.build_intermediate))
        stages += super().stages
        if self.has_undistilled:
            inside = self.folder / ALONE
            alone = undistilled_recipe(self.recipe, self._named_start(inside))
            stages.append(Stage(inside, alone, self.build_undistilled))
        return stages

    def _named_start(self, folder: Path) -> str:
        """Return the path of the student before any stage, as a file in `folder` names it.

        The path is relative if this run made the student, because the run may be moved to another
        machine.
        """
        made_here = self.recipe.student.source is None and self.recipe.general.run is None
        if made_here:
            return Path(os.path.relpath(self.start, folder)).as_posix()
        return str(self.start)

    def taught_by(self, workload: Workload) -> Sequence[Model | PrecomputedLogits]:
        if self.soft_NC is None:
            return self.teachers
        assert isinstance(workload, LabelledWorkload)
        return [workload.precomputed(self.soft_NC, None)]

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
        log(*copies.notes)
        task = workload.data.task
        form = row_format(self.recipe.data, task, self.origin)
        features = Features.of(task, copies.examples, self.origin.tokenizer, form)
        return workload.with_examples(features), copies.notes

    @property
    def train_workload(self) -> LabelledWorkload:
        return self.augmented[0] if self.recipe.augment.predict else self.workload

    @property
    def _init(self) -> str:
        """How the student starts.

        A dry run does not fit a static student, because its size is all that counts.
        """
        skips_fit = self.context.dry_run and self.shape.is_static
        return "random" if skips_fit else self.recipe.student.init

    def objectives(self) -> dict[str, Objective]:
        """Build the method's objective for each student."""
        objectives: dict[str, Objective] = {}
        for name, planned in self.students.items():
            shape = planned.shape
            teacher = self.teachers[0].shape if self.teachers else shape
            objectives[name] = objective_of(self.recipe, teacher, shape, self.context.session)
            if self.teachers:
                config = self.teachers[0].model.config
                check_relations(config, objectives[name].teacher_needs)
        return objectives

    def joint_objectives(self) -> Mapping[str, Objective]:
        return self.objectives() if self.stage == "joint" else {}

    def begin(self, stage: str) -> None:
        if not self.context.dry_run:
            task = task_title(str(self.recipe.task))
            log(f"{self.recipe.method} on {task}: {stage} stage")
        super().begin(stage)

    def build_intermediate(self) -> StageJob:
        """Build the stage that trains the method's objective, on the examples and their copies."""
        self.begin("intermediate")
        settings, cards = stage_settings(self.recipe), self.cards({})
        with self._student_before() as source:
            encoder = load_encoder(source)
        self.set_dropout(encoder)
        workload, objectives = self.augmented[0], self.objectives()
        students = {
            name: Student(network, objectives[name])
            for name, network in self.members(encoder.model).items()
        }
        plan = workload.plan(settings)
        # Scoring has moved the teacher to the device.
        self.teachers[0].model.cpu()
        job = objective_job(students, self.teachers[0], workload, plan, place=self.store)
        per_copy = settings.max_steps is None
        schedule, steps = self.steps(plan.schedule, plan.steps_per_pass, per_copy=per_copy)
        log_padding(plan.order)
        return StageJob(job, schedule, steps, partial(self._finish_intermediate, students), cards)

    def _finish_intermediate(self, students: Mapping[str, Student], outcome: Outcome) -> None:
        if not self.context.is_main:
            return
        folder = self.folder / INTERMEDIATE
        rows = all_rows(self.rows, training_rows(location(str(self.start))))
        # The largest has the layers of all members.
        largest = students[self.largest]
        save_model(largest.encoder, self.origin.tokenizer, folder, rows)
        models = self.entries({self.largest: largest.encoder}, folder=folder)
        models.append(Entry.without_distillation(self.largest))
        contents = ReportContents("distill", self.recipe, models, outcome)
        contents.notes = list(largest.objective.notes)
        losses = held_out_losses(RunDir(folder), list(students))
        own = {name: one for name, one in losses.items() if name.startswith(self.largest)}
        contents.quality = {HELD_OUT_LOSS: own}
        self.context.report(contents, folder=folder)
        delete_signals(self.folder)

    def make(self) -> Model:
        recipe = self.recipe
        if not recipe.train.trains:
            teacher = self.teachers[0]
            # Scoring may have moved the teacher.
            teacher.model.cpu()
            start = Start(
                self._init, recipe.student.copied(self.shape.layers), seed=recipe.train.seed
            )
            return self.train_workload.fitted_student(teacher, self.shape, start)
        before = self.folder / INTERMEDIATE if self.stage == "separate" else None
        with self._student_before(before) as source:
            # A label map belongs to the teacher.
            head = recipe.head.model_copy(update={"label_map": None})
            student = self._loaded(source, head, recipe.train.seed)
        self.set_dropout(student)
        return student

    def _loaded(self, source: str, head: TaskHeadSettings, seed: int) -> Model:
        """Load the student at the beginning of a stage. A static student starts with its head."""
        new_head = not self.shape.is_static
        return self.workload.load(source, head=head, seed=seed, new_head=new_head)

    def build_undistilled(self) -> StageJob:
        """Build the stage that fine-tunes the same student without a teacher.

        Its score shows whether the distillation was worth it.
        """
        log(f"run {ALONE}")
        with self._student_before() as source:
            recipe = undistilled_recipe(self.recipe, source).recipe
            model = self._loaded(source, recipe.head, recipe.train.seed)
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

    def score_untrained(self) -> None:
        # The student that was fine-tuned without a teacher takes its place.
        return

    def result(self, chosen: Sequence[str]) -> EvaluationResult:
        evaluations = [row for name, one in self.scores.items() for row in one.rows(name)]
        if self.has_undistilled:
            alone = RunResult.read(self.folder / ALONE).report
            evaluations += [e.model_copy(update={"model": WITHOUT}) for e in alone.evaluations]
            # Only the scores of this student are needed.
            drop_weights(self.folder / ALONE)
        return EvaluationResult(evaluations)

    def without(self) -> list[Entry]:
        return [Entry.without_distillation(STUDENT, "undistilled")] if self.has_undistilled else []

    def notes(self) -> list[str]:
        recipe, notes = self.recipe, [*self.augmented[1], *super().notes()]
        notes += [f"teacher: {teacher.source}" for teacher in self.teachers[1:]]
        if recipe.soft_labels is not None:
            notes.append(
                f"the student learned the soft labels in {recipe.soft_labels}; no teacher was read"
            )
        elif self.teachers and self.origin is not self.teachers[0]:
            notes.append(
                f"{self.origin.source} and its teacher each read the rows with their own tokenizer"
            )
        if recipe.general.use:
            notes.append(f"the student before the task: {self._named_start(self.folder)}")
        if self.has_undistilled:
            notes.append(
                f"{WITHOUT}: started from the same weights and was fine-tuned on the examples "
                "without a teacher"
            )
        return notes

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
        depth = self.shape.layers
        layers = None if student.layers == "measured" else student.copied(depth)
        start = Start(self._init, layers, seed=self.recipe.train.seed)
        built = self.workload.make_student(encoder, self.shape, start)
        for note in built.notes:
            log(f"{self.largest}: {note}")
        save_model(built.model, self.origin.tokenizer, folder, teacher.rows)


def prediction_job(
    workload: Workload,
    settings: TrainSettings,
    keep: Keep,
    kd: KdSettings,
    students: Mapping[str, Model],
    teachers: Sequence[Model | PrecomputedLogits],
    objectives: Mapping[str, Objective],
    place: StorePlace | None,
    *,
    dry_run: bool = False,
) -> Job:
    """Build a job that trains students against the labels and the teachers' logits.

    If the teachers' logits of held-out rows are unknown, the held-out loss uses the labels alone.

    Args:
        workload: The task.
        settings: How the students are trained.
        keep: The weights to keep.
        kd: How the teachers' logits are weighted against the labels.
        students: The student, or the members of a family.
        teachers: The teachers, or logits from a file.
        objectives: An objective of each student against the first teacher, which is added to its
            loss; empty for none.
        place: Where signals may be stored if there is a single teacher, or if a teacher has its
            own tokenizer.
        dry_run: Only measure, and compute no signals in advance.
    """
    needs = Needs()
    for name, objective in objectives.items():
        needs |= objective.teacher_needs
        if any(True for _ in objective.projections.parameters()):
            first = teachers[0]
            assert isinstance(first, Model)
            network = first.model.cpu()
            fit_projections(objective, network, students[name].model, workload.sample)
    targets: list[Targets] = []
    # Without a weight and without an objective, nothing is learned from the teachers.
    if kd.weight or objectives or not workload.has_labels:
        plan = workload.plan(settings)
        passes = plan.schedule.steps / plan.steps_per_pass
        targets = targets_of_all(workload, teachers, needs, passes, place, dry_run=dry_run)
    jobs: dict[str, Job] = {}
    for name, student in students.items():
        own = objectives.get(name)
        extra_terms = None if own is None else partial(objective_terms, own)
        job, _ = taught_job(workload, student, settings, keep, targets, kd, extra_terms)
        if own is not None:
            captured = job.modules["model"]
            assert isinstance(captured, Capture)
            captured.needs = captured.needs | own.student_needs
            if any(True for _ in own.projections.parameters()):
                job = replace(job, modules={**job.modules, "projections": own.projections})
        jobs[name] = job
    return family_job(jobs, {name: student.shape.layers for name, student in students.items()})


def targets_of_all(
    workload: Workload,
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
