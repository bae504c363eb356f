"""Distil on text: teacher -> [assistant ->] students, where each training is its own stage.

The teacher's signals for a batch of token ids are computed once, for the losses of all students.
"""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kdcli.disk import as_directory
from kdcli.engine.launch import check_machine
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses import inputs_of
from kdcli.messages import log
from kdcli.metrics.probe import probe_demo
from kdcli.models.grammar import goal_of, is_static_shape, short_name
from kdcli.models.layout import layout_for
from kdcli.models.load import load_config, load_encoder, load_tokenizer, save_model
from kdcli.models.masked_head import student_with_head
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import Entry, RunResult, quality_of
from kdcli.report.schema import ASSISTANT, AT, HELD_OUT_LOSS, TEACHER, UNDISTILLED, Role
from kdcli.run.context import RunContext
from kdcli.run.stages import Run, Stage, StageJob
from kdcli.types import Outcome
from kdcli.verbs.distill.distillation import (
    Distillation,
    Planned,
    assistant_recipe,
    card_of,
    held_out_losses,
    log_notes,
    objective_job,
    plan,
    start_of,
    variants_recipe,
    with_measured_layers,
)
from kdcli.verbs.distill.fast import shape_notes, with_shape
from kdcli.verbs.distill.recipe_checks import check_text_recipe, is_masked
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.student import Student, objective_of, relation_kernel
from kdcli.workloads.blocks import TextWorkload, check_masking, load_text_model, read_corpus
from kdcli.workloads.finetuning import (
    DOWNSTREAM,
    Downstream,
    check_downstream,
    compare_downstream,
    open_downstream,
)
from kdcli.workloads.scores import EvaluationResult


def read_text(recipe: DistillRecipe, options: RunOptions) -> None:
    """Check everything that needs no weights, then tokenise the text unless it is cached.

    Call it before the processes join. Tokenising may take hours, but a process group times out
    after minutes if all processes wait for one.
    """
    check_text_recipe(recipe)
    relation_kernel(recipe.relation.kernel, *check_machine(recipe.train.dtype, options))
    source = str(recipe.teacher)
    config = load_config(source)
    if not all(map(is_static_shape, recipe.student.to)):
        layout_for(config).check_layers()
    if goal_of(recipe.student.to) is None:
        options.check_pushed(len(plan(recipe, config)))
    check_downstream(recipe.eval, recipe.train.seed)
    tokenizer = load_tokenizer(source)
    if is_masked(recipe):
        check_masking(recipe.data, tokenizer, source)
    read_corpus(recipe.data, tokenizer)


def _load(recipe: DistillRecipe, source: str) -> Model:
    """Load an encoder, with its masked-language-model head if the loss needs the head."""
    # A teacher needs no head if its predictions are not learned.
    bare = "masked" not in inputs_of(recipe.method)
    otherwise = "choose a method that reads plain text, such as minilm"
    if bare:
        otherwise = "set loss.masked_lm_weight=0"
    return load_text_model(source, masked=is_masked(recipe), otherwise=otherwise, bare=bare)


def open_text(context: RunContext[DistillRecipe]) -> Run:
    """Check everything and open the text, which `read_text` has tokenised.

    The run has one stage for each group of students. Its directory is not claimed.
    """
    recipe = context.recipe
    teacher = _load(recipe, str(recipe.teacher))
    workload = TextWorkload(
        context.session,
        read_corpus(recipe.data, teacher.tokenizer),
        recipe.data,
        teacher.tokenizer,
        teacher.source,
        seed=recipe.train.seed,
        masked=is_masked(recipe),
    )
    context = with_shape(context, workload, teacher)
    planned = plan(context.recipe, teacher.model.config)
    context.options.check_pushed(len(planned))
    tasks = _open_tasks(context, workload)
    for variant in recipe.variants:
        if all(one.variant != variant for one in planned.values()):
            log(f"variant {variant} changes nothing here and is skipped")
    if recipe.student.layers == "measured":
        if any(one.assistant for one in planned.values()):
            raise UsageError(
                "student.layers=measured compares students with the teacher, but a teacher "
                "assistant teaches them",
                "add --assistant none, or name the layers",
            )
        shapes = [one.shape for one in planned.values()]
        context = with_measured_layers(context, workload, teacher, shapes)
        planned = plan(context.recipe, teacher.model.config)
    groups = _groups(context, workload, teacher, tasks, planned)
    stages = [Stage(group.folder, group.context.resolved, group.build) for group in groups]
    return Run(stages, resolved=context.resolved)


def _open_tasks(context: RunContext[DistillRecipe], workload: TextWorkload) -> Downstream:
    """Open the tasks on which the students are compared."""
    settings, train = context.recipe.eval, context.recipe.train
    tasks: Downstream = {}
    if settings.tasks:
        tasks = open_downstream(settings, str(context.recipe.teacher), train.seed, context)
    steps = workload.plan(train).schedule.steps
    if late := [step for step in settings.at if step >= steps]:
        raise UsageError(f"eval.at: step {late[0]} is not before the last step, {steps}")
    if settings.at and not tasks and not context.dry_run:
        raise UsageError(
            "eval.at scores students on tasks, but no task was given", "add --eval-task TASK"
        )
    return tasks


def _groups(
    context: RunContext[DistillRecipe],
    workload: TextWorkload,
    teacher: Model,
    tasks: Downstream,
    planned: Mapping[str, Planned],
) -> list[StudentGroup]:
    """Group the students by their assistants.

    The group of the first student is trained last, and reports on all students.
    """
    folder, resolved, groups = context.folder, context.resolved, list[StudentGroup]()
    shared, card = (workload, [teacher], teacher), card_of([teacher])
    first = next(iter(planned.values())).assistant
    assistants = {p.assistant for p in planned.values()}
    for assistant in sorted(assistants, key=lambda a: (a == first, str(a))):
        before, own = None, {n: p for n, p in planned.items() if p.assistant == assistant}
        short = "no-assistant"
        if assistant is not None:
            shape = short_name(assistant, teacher.shape)
            short = f"assistant-{shape}"
            if context.recipe.assistant == "auto":
                log(
                    f"training a teacher assistant {shape} first, because the student has at most "
                    "half the teacher's layers and half its width; --assistant none omits it"
                )
            alone = assistant_recipe(resolved, shape)
            stage = replace(context, folder=folder / as_directory(short), resolved=alone)
            taught = {ASSISTANT: Planned(ASSISTANT, assistant, alone.recipe)}
            before = StudentGroup(stage, *shared, taught, card, context, groups, tasks)
            groups.append(before)
        stage = context
        if assistant != first:
            inside = folder / as_directory(f"students-{short}")
            recipe = variants_recipe(resolved, own.values())
            stage = replace(context, folder=inside, resolved=recipe)
        groups.append(StudentGroup(stage, *shared, own, card, context, groups, tasks, before))
    return groups


@dataclass(eq=False)
class StudentGroup(Distillation):
    """Students, or one assistant, that are trained together against one teacher.

    Attributes:
        run: The run that the stage belongs to.
        groups: All groups, in the order of training.
        tasks: The tasks on which the students are compared.
        assistant: The group whose student teaches this group; None if the teacher does.
    """

    run: RunContext[DistillRecipe]
    groups: list[StudentGroup]
    tasks: Downstream
    assistant: StudentGroup | None = None

    @property
    def is_assistant(self) -> bool:
        """Whether the group is an assistant, which teaches the next group."""
        return ASSISTANT in self.students

    @property
    def is_last(self) -> bool:
        """Whether the group reports on all students."""
        return self is self.groups[-1]

    def all_students(self) -> dict[str, tuple[Planned, Path]]:
        """Return all students except assistants, each with the directory that it is saved in."""
        groups = [group for group in reversed(self.groups) if not group.is_assistant]
        return {
            n: (p, group.model_folder(n)) for group in groups for n, p in group.students.items()
        }

    def checkpoint(self, name: str, step: int) -> Path:
        """Return the directory of a student's weights after a step, which exists until scoring."""
        directory = as_directory(f"{name}{AT}{step}").replace(" ", "-")
        return self.run.folder / DOWNSTREAM / directory

    def build(self) -> StageJob:
        """Load the teacher, make the students, and build the job that trains them."""
        teacher, trains = self._teacher(), self.recipe.train.trains
        students = self._build_students(teacher)
        cards = self.cards({name: student.encoder for name, student in students.items()})
        if self.assistant is not None:
            cards.pop(TEACHER, None)
        at_step = None
        if self.tasks and not self.is_assistant:
            at_step = partial(self._keep, students)
        steps = self.workload.plan(self.recipe.train)
        job = objective_job(
            students, teacher, self.workload, steps, trains=trains, on_step_end=at_step
        )
        finish = partial(self._finish, students)
        return StageJob(job, steps.schedule, steps.steps_per_pass, finish, cards)

    def _keep(self, students: Mapping[str, Student], done: int) -> None:
        """Save the students after a step, if they will be scored at this step."""
        if done not in self.run.recipe.eval.at or not self.context.is_main:
            return
        for name, student in students.items():
            folder = self.checkpoint(name, done)
            save_model(student.encoder, self.origin.tokenizer, folder, self.rows)

    def _finish(self, students: Mapping[str, Student], outcome: Outcome) -> None:
        for name, student in students.items() if self.context.is_main else ():
            folder = self.model_folder(name)
            save_model(student.encoder, self.origin.tokenizer, folder, self.rows)
        self.context.session.wait()
        scores = EvaluationResult()
        if self.is_last and self.tasks:
            scores = self._scores()
        if self.context.is_main:
            self._report(students, outcome, scores)

    def _teacher(self) -> Model:
        """Return the teacher, or load the assistant that teaches this group."""
        teacher, before = self.teachers[0], self.assistant
        if before is None:
            return teacher
        if not self.context.dry_run:
            return _load(self.recipe, str(before.folder))
        # A dry run saves no assistant, so an untrained one stands in. The estimate of the
        # assistant's stage has moved the teacher to the device.
        (one,) = before.students.values()
        teacher.model.cpu()
        assistant = before._initialized(teacher, one).model
        return replace(teacher, model=assistant, source=str(before.folder))

    def _initialized(self, teacher: Model, planned: Planned) -> InitializedStudent:
        """Make a student before training, with a head if its loss reads masked text."""
        recipe = planned.recipe
        built = self._copied(teacher, planned)
        if not is_masked(recipe):
            return built
        init, seed = recipe.student.init, recipe.train.seed
        return student_with_head(teacher.model, built, init=init, seed=seed)

    def _copied(self, teacher: Model, planned: Planned) -> InitializedStudent:
        """Make the encoder of a student before training."""
        start = start_of(planned.recipe.student, planned.shape.layers, planned.recipe.train.seed)
        return self.workload.make_student(teacher, planned.shape, start)

    def _build_students(self, teacher: Model) -> dict[str, Student]:
        """Make every student with its loss."""
        students: dict[str, Student] = {}
        # Variants of one shape start from the same weights, so each shape is made once.
        first_of_shape = {p.shape: p for p in self.students.values()}
        starts = self.initialized(
            {str(shape): shape for shape in first_of_shape},
            lambda shape: self._initialized(teacher, first_of_shape[shape]),
        )
        for name, planned in self.students.items():
            built = starts[str(planned.shape)]
            # Members of a family stay one network.
            built = built if built.whole else copy.deepcopy(built)
            objective = objective_of(
                planned.recipe, teacher.shape, planned.shape, self.context.session
            )
            students[name] = Student(built.model, objective)
            log_notes(name, [*built.notes, *objective.notes])
        return students

    def _scores(self) -> EvaluationResult:
        """Fine-tune and score the teacher, the students, and their undistilled copies.

        An undistilled copy is a student that was copied from the teacher and not distilled.
        """
        recipe, folder = self.recipe, self.folder / DOWNSTREAM
        sources: dict[str, str | Path] = {TEACHER: str(recipe.teacher)}
        baselines = {}
        for name, (planned, place) in self.all_students().items():
            sources |= {f"{name}{AT}{step}": self.checkpoint(name, step) for step in recipe.eval.at}
            sources[name] = place
            if not recipe.train.trains:
                baselines[name] = TEACHER
                continue
            baselines[name] = planned.like + UNDISTILLED
            copied = folder / as_directory(baselines[name]).replace(" ", "-")
            sources[baselines[name]] = copied
            if self.context.is_main and not copied.exists():
                fresh = load_encoder(str(recipe.teacher))
                built = self._copied(fresh, planned)
                save_model(built.model, fresh.tokenizer, copied, fresh.rows)
        self.context.session.wait()
        seeds = recipe.eval.seeds
        result = compare_downstream(
            self.run, self.tasks, sources, folder, seeds=seeds, baselines=baselines
        )
        checkpoints = itertools.product(self.all_students(), recipe.eval.at)
        for name, step in checkpoints if self.context.is_main else ():
            shutil.rmtree(self.checkpoint(name, step), ignore_errors=True)
        return result

    def _report(
        self, students: Mapping[str, Student], outcome: Outcome, scores: EvaluationResult
    ) -> None:
        """Write the stage's report.

        The last stage also reports on earlier students, probes the demo's tasks and measures
        latency.
        """
        recipe, notes = self.recipe, list[str]()
        role: Role = "assistant" if self.is_assistant else "student"
        encoders = {name: student.encoder for name, student in students.items()}
        teacher, *own = self.entries(encoders, role=role)
        before = [teacher]
        if self.is_last:
            notes += shape_notes(recipe.student)
        if scores.evaluations:
            notes += [
                f"{name}: {note}"
                for name, task in self.tasks.items()
                for note in task.workload.notes
            ]
        if self.assistant is not None:
            card = RunResult.read(self.assistant.folder).report.cards[ASSISTANT]
            before.append(Entry(ASSISTANT, "assistant", card, TEACHER))
            notes.append(
                "the held-out losses are measured against the assistant, from which the student "
                "also started; everything else is compared with a student copied from the teacher "
                "itself"
            )
        losses: dict[str, dict[str, float]] = {}
        # Earlier stages have saved their students.
        earlier = [g for g in self.groups if self.is_last and g is not self and not g.is_assistant]
        for group in earlier:
            report = RunResult.read(group.folder).report
            before += [
                Entry(name, "student", report.cards[name], TEACHER, variant=planned.variant)
                for name, planned in group.students.items()
            ]
            losses |= report.quality[HELD_OUT_LOSS]
        losses |= held_out_losses(RunDir(self.folder), list(self.students))
        trained = [name for group in (*earlier, self) for name in group.students]
        models = [*before, *own, *self._models_without_files(trained, scores)]
        contents = self.workload.report(
            "distill", recipe, models, outcome, result=scores, notes=notes
        )
        contents.quality = quality_of(scores.evaluations)
        if self.is_last and recipe.data.source == "demo":
            contents.quality |= self._demo_probes(students)
        contents.quality |= {HELD_OUT_LOSS: losses}
        self.run.report(contents, recipe.measure if self.is_last else None, self.folder)

    def _models_without_files(
        self, trained: Sequence[str], scores: EvaluationResult
    ) -> list[Entry]:
        """Return the models before training and, if they were scored, at their checkpoints."""
        if not self.recipe.train.trains:
            return []
        extra = {start.name: start for start in map(Entry.without_distillation, trained)}
        if not scores.evaluations:
            return list(extra.values())
        for name, (planned, _) in self.all_students().items():
            for step in self.recipe.eval.at:
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
        source = self.teachers[0].source
        whole, fresh = load_encoder(source), load_encoder(source)
        probes = {TEACHER: probe_demo(whole.model, whole.tokenizer)}
        recipe = self.recipe
        for name, student in students.items():
            probes[name] = probe_demo(student.encoder.base_model, fresh.tokenizer)
            if not recipe.train.trains:
                continue
            copied = self._copied(fresh, self.students[name]).model
            probes[name + UNDISTILLED] = probe_demo(copied, fresh.tokenizer)
        return {
            f"{task} probe": {name: p[task] for name, p in probes.items()}
            for task in probes[TEACHER]
        }
