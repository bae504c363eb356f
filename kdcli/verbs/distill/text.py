"""Distil on text: teacher -> [assistant ->] students, where each training is its own stage.

The teacher's signals for a batch of token ids are computed once, for the losses of all students.
After training, the students are saved and reported.
"""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from kdcli.deploy.latency import Subject
from kdcli.disk import as_directory
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses import build_objective, inputs_of
from kdcli.metrics.probe import probe_demo
from kdcli.models.card import describe, describe_source
from kdcli.models.grammar import short_name
from kdcli.models.load import load_encoder, location, save_model
from kdcli.models.masked_lm import student_with_head
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent
from kdcli.recipe.resolve import Resolved
from kdcli.report.entry import Entry
from kdcli.report.finish import (
    RunResult,
    quality_of,
)
from kdcli.report.schema import ASSISTANT, AT, HELD_OUT_LOSS, TEACHER, UNDISTILLED, Role
from kdcli.run.context import RunContext
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.targets.targets import LiveTargets, targets_of
from kdcli.types import Card, ModelShape, Outcome
from kdcli.verbs.distill.fast import how_distilled, shape_notes, with_shape
from kdcli.verbs.distill.held_out import held_out_losses
from kdcli.verbs.distill.layers import start_of, with_measured_layers
from kdcli.verbs.distill.plan import (
    Planned,
    assistant_recipe,
    plan,
    variants_recipe,
)
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.student import (
    Student,
    distill_job,
    fit_projections,
    freeze_unreached,
    relation_kernel,
    teacher_needs,
)
from kdcli.verbs.distill.text_checks import is_masked
from kdcli.workloads.finetuning import DOWNSTREAM, Downstream, compare_downstream, open_downstream
from kdcli.workloads.scores import EvaluationResult
from kdcli.workloads.text import TextWorkload, load_text_model, read_corpus


def _load(
    recipe: DistillRecipe,
    source: str,
) -> Model:
    """Load an encoder, with its masked-language-model head if the loss needs the head."""
    # A teacher needs no head if its predictions are not learned.
    bare = "masked" not in inputs_of(recipe.method)
    otherwise = "choose a method that reads plain text, such as minilm"
    if bare:
        otherwise = "set loss.masked_lm_weight=0"
    return load_text_model(source, masked=is_masked(recipe), otherwise=otherwise, bare=bare)


@dataclass(frozen=True)
class TextDistillation:
    """A distillation on text, checked and tokenised.

    Attributes:
        context: The run.
        teacher: The teacher of the first stage.
        card: The description of the teacher as it was loaded.
        workload: The text.
        downstream: The tasks on which the students are compared.
        groups: The groups of students that are trained together, in the order of training.
    """

    context: RunContext[DistillRecipe]
    teacher: Model
    card: Card
    workload: TextWorkload
    downstream: Downstream
    groups: list[StudentGroup] = field(default_factory=list)

    def untrained(self) -> Model:
        """Load the encoder that students are copied from again."""
        source = str(self.context.recipe.teacher)
        return load_encoder(source)

    def checkpoint(self, name: str, step: int) -> Path:
        """Return the directory of a student's weights after a step, which exists until scoring."""
        directory = as_directory(f"{name}{AT}{step}").replace(" ", "-")
        return self.context.folder / DOWNSTREAM / directory

    def students(self) -> dict[str, tuple[Planned, Path]]:
        """Return all students except assistants, each with the directory that it is saved in."""
        groups = [group for group in reversed(self.groups) if not group.is_assistant]
        return {n: (p, group.model_folder(n)) for group in groups for n, p in group.planned.items()}

    @property
    def run(self) -> Run:
        """The run: one stage for each group. The last stage writes the report."""
        stages = [Stage(group.folder, group.resolved, group.build) for group in self.groups]
        return Run(stages, resolved=self.context.resolved)


def prepare_text(context: RunContext[DistillRecipe]) -> Run:
    """Check everything and open the text, which `read_text` has tokenised.

    The run directory is not claimed.

    Raises KdcliError: the recipe, a model or the data cannot be used.
    """
    return open_text(context).run


def open_text(context: RunContext[DistillRecipe]) -> TextDistillation:
    """Check everything and open the text; see `prepare_text`."""
    recipe, session = context.recipe, context.session
    source = str(recipe.teacher)
    teacher = _load(recipe, source)
    workload = TextWorkload(
        session,
        read_corpus(recipe.data, teacher.tokenizer),
        recipe.data,
        teacher.tokenizer,
        teacher.source,
        seed=recipe.train.seed,
        masked=is_masked(recipe),
    )
    context = with_shape(context, workload, teacher)
    recipe = context.recipe
    planned = plan(recipe, teacher.model.config)
    context.options.check_pushed(len(planned))
    tasks: Downstream = {}
    if recipe.eval.tasks:
        tasks = open_downstream(recipe.eval, source, recipe.train.seed, context)
    card = describe_source(teacher.model, teacher.source)
    steps = workload.plan(recipe.train).schedule.steps
    if late := [step for step in recipe.eval.at if step >= steps]:
        raise UsageError(f"eval.at: step {late[0]} is not before the last step, {steps}")
    if recipe.eval.at and not tasks and not context.dry_run:
        raise UsageError(
            "eval.at scores students on tasks, but no task was given", "add --eval-task TASK"
        )
    for variant in recipe.variants:
        if all(one.variant != variant for one in planned.values()):
            Progress.log(f"variant {variant} changes nothing here and is skipped")
    if recipe.student.layers == "measured":
        if any(one.assistant for one in planned.values()):
            raise UsageError(
                "student.layers=measured compares students with the teacher, but a teacher "
                "assistant teaches them",
                "add --assistant none, or name the layers",
            )
        context = with_measured_layers(
            context, workload, teacher, {one.shape.layers for one in planned.values()}
        )
        planned = plan(context.recipe, teacher.model.config)
    whole = TextDistillation(context, teacher, card, workload, tasks)
    _add_groups(whole, planned)
    return whole


def _add_groups(whole: TextDistillation, planned: Mapping[str, Planned]) -> None:
    """Group the students by their assistants.

    The group of the first student is trained last, and reports on all students.
    """
    context, shape = whole.context, whole.teacher.shape
    folder, resolved = context.folder, context.resolved
    first = next(iter(planned.values())).assistant
    assistants = {p.assistant for p in planned.values()}
    for assistant in sorted(assistants, key=lambda a: (a == first, str(a))):
        before, own = None, {n: p for n, p in planned.items() if p.assistant == assistant}
        short = "no-assistant"
        if assistant is not None:
            short = f"assistant-{short_name(assistant, shape)}"
            alone = assistant_recipe(resolved, short.removeprefix("assistant-"))
            taught = {ASSISTANT: Planned(ASSISTANT, assistant, alone.recipe, None)}
            before = StudentGroup(whole, folder / as_directory(short), alone, taught)
            whole.groups.append(before)
        if assistant == first:
            whole.groups.append(StudentGroup(whole, folder, resolved, own, before))
        else:
            inside = folder / as_directory(f"students-{short}")
            recipe = variants_recipe(resolved, own.values())
            whole.groups.append(StudentGroup(whole, inside, recipe, own, before))


@dataclass(frozen=True, eq=False)
class StudentGroup:
    """Students, or one assistant, that are trained together against one teacher.

    Attributes:
        whole: The distillation that the group belongs to.
        folder: The directory of the group's stage.
        resolved: The recipe of the group's stage.
        planned: The students by name.
        assistant: The group whose student teaches this group; None if the teacher does.
    """

    whole: TextDistillation
    folder: Path
    resolved: Resolved[DistillRecipe]
    planned: Mapping[str, Planned]
    assistant: StudentGroup | None = None

    @property
    def is_assistant(self) -> bool:
        """Whether the group is an assistant, which teaches the next group."""
        return ASSISTANT in self.planned

    @property
    def is_last(self) -> bool:
        """Whether the group reports on all students."""
        return self is self.whole.groups[-1]

    def model_folder(self, name: str) -> Path:
        """Return where a student is saved: the stage's directory, or its own directory in it."""
        if len(self.planned) == 1:
            return self.folder
        return self.folder / as_directory(name).replace(" ", "-")

    def build(self) -> StageJob:
        """Load the teacher, make the students, and build the job that trains them."""
        context, workload, recipe = self.whole.context, self.whole.workload, self.resolved.recipe
        teacher = self._load_teacher()
        students = self._build_students(teacher)
        cards = {}
        if context.dry_run:
            if self.assistant is None:
                cards[TEACHER] = self.whole.card
            for name, student in students.items():
                cards[name] = describe(student.encoder, str(self.model_folder(name)), None)
        needs = teacher_needs(students)
        targets = targets_of(teacher, workload.examples, needs, context.session)
        assert isinstance(targets, LiveTargets)
        steps = workload.plan(recipe.train)
        at_step = None
        if self.whole.downstream and not self.is_assistant:

            def at_step(done: int) -> None:
                self._keep(students, teacher, done)

        job = distill_job(students, targets, workload, steps.order, on_step_end=at_step)

        def finish(outcome: Outcome) -> None:
            self._finish(students, teacher, outcome)

        return StageJob(job, steps.schedule, steps.steps_per_pass, finish, cards)

    def _keep(self, students: Mapping[str, Student], teacher: Model, done: int) -> None:
        """Save the students after a step, if they will be scored at this step."""
        context = self.whole.context
        if done not in context.recipe.eval.at or not context.is_main:
            return
        for name, student in students.items():
            folder = self.whole.checkpoint(name, done)
            save_model(student.encoder, teacher.tokenizer, folder, teacher.rows)

    def _finish(self, students: Mapping[str, Student], teacher: Model, outcome: Outcome) -> None:
        context = self.whole.context
        for name, student in students.items() if context.is_main else ():
            folder = self.model_folder(name)
            save_model(student.encoder, teacher.tokenizer, folder, teacher.rows)
        context.session.wait()
        scores = EvaluationResult()
        if self.is_last and self.whole.downstream:
            scores = self._scores()
        if context.is_main:
            self._report(students, outcome, scores)

    def _load_teacher(self) -> Model:
        """Return the teacher, or load the assistant that teaches this group."""
        whole, before = self.whole, self.assistant
        if before is None:
            return whole.teacher
        if not whole.context.dry_run:
            return _load(self.resolved.recipe, str(before.folder))
        # A dry run saves no assistant, so an untrained one stands in. The estimate of the
        # assistant's stage has moved the teacher to the device.
        (one,) = before.planned.values()
        whole.teacher.model.cpu()
        assistant = before._initialized(whole.teacher, one).model
        rows = whole.teacher.rows
        return Model(assistant, whole.teacher.tokenizer, str(before.folder), rows=rows)

    def _initialized(self, teacher: Model, planned: Planned) -> InitializedStudent:
        """Make a student before training, with a head if its loss reads masked text."""
        recipe = planned.recipe
        built = self._copied(recipe, teacher, planned.shape)
        if not is_masked(recipe):
            return built
        init, seed = recipe.student.init, recipe.train.seed
        return student_with_head(teacher.model, built, init=init, seed=seed)

    def _copied(
        self, recipe: DistillRecipe, teacher: Model, shape: ModelShape
    ) -> InitializedStudent:
        """Make the encoder of a student before training."""
        start = start_of(recipe.student, recipe.train.seed)
        return self.whole.workload.make_student(teacher, shape, start)

    def _build_students(self, teacher: Model) -> dict[str, Student]:
        """Build every student and freeze the weights that its loss does not reach."""
        session, workload = self.whole.context.session, self.whole.workload
        wanted = self.resolved.recipe.relation.kernel
        kernel = relation_kernel(wanted, session.device, session.compute_dtype)
        students: dict[str, Student] = {}
        # Variants of one shape start from the same weights, so each shape is made once.
        first_of_shape = {p.shape: p for p in self.planned.values()}
        starts = {p.shape: self._initialized(teacher, p) for p in first_of_shape.values()}
        for name, planned in self.planned.items():
            built, recipe = copy.deepcopy(starts[planned.shape]), planned.recipe
            # Random projections must depend on the seed alone.
            torch.manual_seed(recipe.train.seed)
            objective = build_objective(
                recipe.method, recipe.loss, teacher.shape, planned.shape, kernel=kernel
            )
            fit_projections(objective, teacher.model, built.model, workload.sample)
            students[name] = Student(built.model, objective)
            for note in (*built.notes, *students[name].objective.notes):
                Progress.log(f"{name}: {note}")
        if self.resolved.recipe.train.trains:
            freeze_unreached(students, teacher.model, workload.examples.batch(np.arange(1)))
        return students

    def _scores(self) -> EvaluationResult:
        """Fine-tune and score the teacher, the students, and their undistilled copies.

        An undistilled copy is a student that was copied from the teacher and not distilled.
        """
        whole, recipe = self.whole, self.resolved.recipe
        context, folder = whole.context, self.folder / DOWNSTREAM
        sources: dict[str, str | Path] = {TEACHER: str(recipe.teacher)}
        baselines = {}
        for name, (planned, place) in whole.students().items():
            sources |= {
                f"{name}{AT}{step}": whole.checkpoint(name, step) for step in recipe.eval.at
            }
            sources[name] = place
            if not recipe.train.trains:
                baselines[name] = TEACHER
                continue
            baselines[name] = planned.like + UNDISTILLED
            copied = folder / as_directory(baselines[name]).replace(" ", "-")
            sources[baselines[name]] = copied
            if context.is_main and not copied.exists():
                fresh = whole.untrained()
                built = self._copied(recipe, fresh, planned.shape)
                save_model(built.model, fresh.tokenizer, copied, fresh.rows)
        context.session.wait()
        seeds = recipe.eval.seeds
        result = compare_downstream(
            context, whole.downstream, sources, folder, seeds=seeds, baselines=baselines
        )
        checkpoints = itertools.product(whole.students(), recipe.eval.at)
        for name, step in checkpoints if context.is_main else ():
            shutil.rmtree(whole.checkpoint(name, step), ignore_errors=True)
        return result

    def _report(
        self, students: Mapping[str, Student], outcome: Outcome, scores: EvaluationResult
    ) -> None:
        """Write the stage's report.

        The last stage also reports on earlier students, probes the demo's tasks and measures
        latency.
        """
        whole, recipe = self.whole, self.resolved.recipe
        timed = Subject(TEACHER, location(whole.teacher.source))
        models = [Entry(TEACHER, "teacher", whole.card, timed=timed)]
        made = how_distilled(whole.card, recipe)
        losses: dict[str, dict[str, float]] = {}
        notes = shape_notes(recipe.student) if self.is_last else []
        if scores.evaluations:
            notes += [
                f"{name}: {note}"
                for name, task in whole.downstream.items()
                for note in task.workload.notes
            ]
        if self.assistant is not None:
            card = RunResult.read(self.assistant.folder).report.cards[ASSISTANT]
            models.append(Entry(ASSISTANT, "assistant", card, TEACHER))
            notes.append(
                "the held-out losses are measured against the assistant, from which the student "
                "also started; everything else is compared with a student copied from the teacher "
                "itself"
            )
        # Earlier stages have saved their students.
        earlier = [g for g in whole.groups if self.is_last and g is not self and not g.is_assistant]
        for group in earlier:
            report = RunResult.read(group.folder).report
            models += [
                Entry(name, "student", report.cards[name], TEACHER, variant=planned.variant)
                for name, planned in group.planned.items()
            ]
            losses |= report.quality[HELD_OUT_LOSS]
        role: Role = "assistant" if self.is_assistant else "student"
        for name, planned in self.planned.items():
            encoder, folder = students[name].encoder, self.model_folder(name)
            source = str(recipe.teacher)
            saved = Entry.saved(name, role, encoder, folder, TEACHER, made=made, source=source)
            models.append(replace(saved, variant=planned.variant))
        losses |= held_out_losses(RunDir(self.folder), list(self.planned))
        trained = [name for group in (*earlier, self) for name in group.planned]
        models += self._models_without_files(trained, scores)
        contents = whole.workload.report(
            "distill", recipe, models, outcome, result=scores, notes=notes
        )
        contents.quality = quality_of(scores.evaluations)
        if self.is_last and recipe.data.source == "demo":
            contents.quality |= self._demo_probes(students)
        contents.quality |= {HELD_OUT_LOSS: losses}
        whole.context.report(contents, recipe.measure if self.is_last else None, self.folder)

    def _models_without_files(
        self, trained: Sequence[str], scores: EvaluationResult
    ) -> list[Entry]:
        """Return the models before training and, if they were scored, at their checkpoints."""
        if not self.resolved.recipe.train.trains:
            return []
        extra = {start.name: start for start in map(Entry.without_distillation, trained)}
        if not scores.evaluations:
            return list(extra.values())
        for name, (planned, _) in self.whole.students().items():
            for step in self.resolved.recipe.eval.at:
                at = f"{name}{AT}{step}"
                extra[at] = Entry(at, "checkpoint", None, of=name, step=step)
            # Variants of one shape share the student that was copied from the teacher.
            start = replace(Entry.without_distillation(planned.like), of=name)
            extra.setdefault(start.name, start)
        return list(extra.values())

    def _demo_probes(
        self, students: Mapping[str, Student]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Train linear probes on the demo's tasks.

        They probe the teacher, every student, and every student before training.
        """
        whole, fresh = load_encoder(self.whole.teacher.source), self.whole.untrained()
        probes = {TEACHER: probe_demo(whole.model, whole.tokenizer)}
        recipe = self.resolved.recipe
        for name, student in students.items():
            probes[name] = probe_demo(student.encoder.base_model, fresh.tokenizer)
            if not recipe.train.trains:
                continue
            copied = self._copied(recipe, fresh, self.planned[name].shape).model
            probes[name + UNDISTILLED] = probe_demo(copied, fresh.tokenizer)
        return {
            f"{task} probe": {name: p[task] for name, p in probes.items()}
            for task in probes[TEACHER]
        }
