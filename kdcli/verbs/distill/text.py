"""Distilling on text: teacher -> [assistant ->] students, each stage a run of its own.

A batch of token ids -> the teacher's signals, once -> the loss of every student -> engine -> saved students -> report.
"""

import copy
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kdcli.data.batches import BatchOrder
from kdcli.data.text.corpus import Corpus, open_corpus
from kdcli.data.text.masking import Masked, PassOrder, check_share, tokens_of
from kdcli.deploy.latency import Latency, Subject
from kdcli.engine.launch import Session, check_machine, choose_output_dir, make_schedule
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, inputs, masks_text
from kdcli.metrics.probe import probe_demo
from kdcli.models.card import describe, describe_source
from kdcli.models.load import (
    load_config,
    load_encoder,
    load_tokenizer,
    location,
    save_model,
)
from kdcli.models.masked_lm import load_masked_lm, student_with_head
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent, build_student
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    RunResult,
    measure,
    quality_of,
    write_report,
)
from kdcli.report.schema import ASSISTANT, AT, TEACHER, UNDISTILLED, Role
from kdcli.run.stages import StageJob
from kdcli.targets.teacher import Teacher
from kdcli.types import Card, Examples, ModelShape, Outcome, Schedule
from kdcli.verbs.distill.plan import (
    Planned,
    as_directory,
    assistant_recipe,
    plan,
    short_name,
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
from kdcli.workloads.compare import (
    DOWNSTREAM,
    DownstreamScores,
    Tasks,
    check_tasks,
    opened,
    scored,
)

HELD_OUT = "held-out loss"  # Quality row of the distillation loss on held-out text


@dataclass(frozen=True)
class TextRun:
    """A distillation on text, checked and tokenised; its stages share these."""

    resolved: Resolved[DistillRecipe]
    invocation: RunOptions
    folder: Path
    session: Session
    teacher: Model
    card: Card  # of the teacher, before its weights take the compute dtype
    corpus: Corpus
    schedule: Schedule
    downstream: Tasks
    stages: "list[TextStage]"

    def report(self) -> None:
        """The last stage wrote it."""

    def untrained(self) -> Model:
        """The teacher's encoder, loaded anew."""
        source, trusted = str(self.resolved.recipe.teacher), self.session.trust_remote_code
        return load_encoder(source, trust_remote_code=trusted)

    def kept(self, name: str, step: int) -> Path:
        """Where a student is until it was scored as it is after a step."""
        return self.folder / DOWNSTREAM / as_directory(f"{name}{AT}{step}").replace(" ", "-")

    def students(self) -> dict[str, tuple[Planned, Path]]:
        """All students, assistants left out, and where each is saved."""
        stages = [stage for stage in reversed(self.stages) if ASSISTANT not in stage.planned]
        return {
            name: (p, stage.model_folder(name))
            for stage in stages
            for name, p in stage.planned.items()
        }


def check_text(recipe: DistillRecipe) -> None:
    """Raise a `UsageError` for a mistake in the recipe alone, before models and data are read."""
    if recipe.teacher is None:
        raise UsageError(
            "no teacher given",
            "kdcli distill TEACHER --to LxH; TEACHER is a hub id, a directory or 'demo'",
        )
    if not recipe.student.to:
        raise UsageError("no student shape given", "add --to LxH, for example --to 6x384")
    check_settings(recipe.method, recipe.loss)
    if not inputs(recipe.method) & {"text", "masked"}:
        raise UsageError(
            f"method {recipe.method} learns from a task's examples, not from text",
            "add --task TASK",
        )


def read_text(recipe: DistillRecipe, invocation: RunOptions) -> None:
    """Check what needs no weights, then tokenise the text unless it is cached. Called before the processes join: it may
    take hours, and a group in which all wait for one ends after minutes. Raises KdcliError: as `prepare_text`."""
    check_text(recipe)
    relation_kernel(recipe.relation.kernel, *check_machine(recipe.train.dtype, invocation))
    source, trusted = str(recipe.teacher), invocation.trust_remote_code
    config = load_config(source, trust_remote_code=trusted)
    invocation.check_pushed(len(plan(recipe, config)))
    check_tasks(recipe.eval, recipe.train.seed)
    tokenizer = load_tokenizer(source, trust_remote_code=trusted)
    if _is_masked(recipe):
        check_share(recipe.data.mask.share)
        tokens_of(tokenizer, source)
    _corpus(recipe, tokenizer)


def _corpus(recipe: DistillRecipe, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    how = recipe.data.model_dump(include={"max_length", "column", "held_out_blocks"})
    isolated = recipe.data.pack_isolated
    return open_corpus(recipe.data.source, tokenizer, isolated=isolated, log=Progress.log, **how)


def prepare_text(
    resolved: Resolved[DistillRecipe], invocation: RunOptions, session: Session
) -> TextRun:
    """Check everything and open the text, which `read_text` has tokenised; claims nothing. Raises KdcliError: the
    recipe, models or data cannot be used."""
    recipe = resolved.recipe
    teacher = _load(recipe, str(recipe.teacher), session)
    planned = plan(recipe, teacher.model.config)
    shapes = dict.fromkeys(short_name(p.shape, teacher.shape) for p in planned.values())
    name = f"distill-{Path(teacher.source).name}-{'+'.join(shapes)}"
    folder = choose_output_dir(as_directory(name), resolved, invocation, session)
    tasks: Tasks = {}
    if recipe.eval.tasks:
        tasks = opened(recipe.eval, str(recipe.teacher), recipe.train.seed, invocation, session)
    card = describe_source(teacher.model, teacher.source)
    corpus = _corpus(recipe, teacher.tokenizer)
    schedule = make_schedule(recipe.train, len(corpus.train) / recipe.train.batch_size)
    if late := [step for step in recipe.eval.at if step >= schedule.steps]:
        raise UsageError(f"eval.at: step {late[0]} is not before the last one, {schedule.steps}")
    if recipe.eval.at and not tasks and not invocation.dry_run:
        raise UsageError(
            "eval.at scores students on tasks, and none was given", "add --eval-task TASK"
        )
    run = TextRun(resolved, invocation, folder, session, teacher, card, corpus, schedule, tasks, [])
    for variant in recipe.variants:
        if not any(name == variant or name.startswith(f"{variant} ") for name in planned):
            Progress.log(f"variant {variant} changes nothing here and is left out")
    # Students of one teacher share a stage; that of the first is the last, and reports on all.
    first = next(iter(planned.values())).assistant
    for assistant in sorted(
        {p.assistant for p in planned.values()}, key=lambda a: (a == first, str(a))
    ):
        before, own = None, {name: p for name, p in planned.items() if p.assistant == assistant}
        short = (
            "no-assistant"
            if assistant is None
            else f"assistant-{short_name(assistant, teacher.shape)}"
        )
        if assistant is not None:
            alone = assistant_recipe(resolved, short.removeprefix("assistant-"))
            taught = {ASSISTANT: Planned(ASSISTANT, assistant, alone.recipe, None)}
            before = TextStage(run, folder / as_directory(short), alone, taught)
            run.stages.append(before)
        if assistant == first:
            run.stages.append(TextStage(run, folder, resolved, own, before))
        else:
            inside = folder / as_directory(f"students-{short}")
            run.stages.append(TextStage(run, inside, variants_recipe(resolved, own), own, before))
    return run


def _is_masked(recipe: DistillRecipe) -> bool:
    return masks_text(recipe.method, recipe.loss)


def _load(recipe: DistillRecipe, source: str, session: Session) -> Model:
    """An encoder, with its masked-language-model head if the loss reads masked text."""
    if not _is_masked(recipe):
        return load_encoder(source, trust_remote_code=session.trust_remote_code)
    # A teacher whose predictions are not learned needs no head.
    bare = "masked" not in inputs(recipe.method)
    otherwise = "methods that need no masked-language-model head: minilm, minilmv2, tinybert"
    otherwise = "set loss.masked_lm_weight=0" if bare else otherwise
    return load_masked_lm(
        source, otherwise=otherwise, bare=bare, trust_remote_code=session.trust_remote_code
    )


@dataclass(eq=False)
class TextStage:
    """The training of all students, or of their assistant, against one teacher. `assistant` is the stage before, whose
    student is this one's teacher. `teacher` and `students` are set by `build`."""

    run: TextRun
    folder: Path
    resolved: Resolved[DistillRecipe]
    planned: Mapping[str, Planned]
    assistant: "TextStage | None" = None
    teacher: Model | None = None
    students: dict[str, Student] = field(default_factory=dict)

    def model_folder(self, name: str) -> Path:
        """Where a student is saved: the run directory, or with several students one directory each."""
        return (
            self.folder
            if len(self.planned) == 1
            else self.folder / as_directory(name).replace(" ", "-")
        )

    def build(self) -> StageJob:
        run, corpus, schedule, masked = (
            self.run,
            self.run.corpus,
            self.run.schedule,
            _is_masked(self.resolved.recipe),
        )
        self.teacher = teacher = self._load_teacher()
        self.students = students = self._build_students(teacher)
        cards = {}
        if run.invocation.dry_run:
            cards = {TEACHER: run.card} if self.assistant is None else {}
            cards |= {
                name: describe(s.encoder, str(self.model_folder(name)), None)
                for name, s in students.items()
            }
        blocks = BatchOrder(len(corpus.train), schedule.batch_size, schedule.seed)
        signals = Teacher.frozen(
            teacher.source, teacher.model, teacher_needs(students), run.session
        ).signals
        train, held_out = (
            self._examples(part, teacher) for part in (corpus.train, corpus.held_out)
        )
        job = distill_job(
            students, signals, train, PassOrder(blocks) if masked else blocks, held_out
        )
        if run.downstream and ASSISTANT not in students:
            job = replace(job, on_step_end=self._keep)
        return StageJob(job, schedule, len(corpus.train) / schedule.batch_size, cards)

    def _keep(self, done: int) -> None:
        """Save the students where they are to be scored before the end."""
        if done not in self.run.resolved.recipe.eval.at or not self.run.session.is_main:
            return
        assert self.teacher is not None
        for name, student in self.students.items():
            save_model(
                student.encoder,
                self.teacher.tokenizer,
                self.run.kept(name, done),
                self.teacher.rows,
            )

    def finish(self, outcome: Outcome) -> None:
        run, teacher = self.run, self.teacher
        assert teacher is not None
        for name, student in self.students.items() if run.session.is_main else ():
            save_model(student.encoder, teacher.tokenizer, self.model_folder(name), teacher.rows)
        run.session.wait()
        final = self is run.stages[-1]
        scores = self._scores() if final and run.downstream else DownstreamScores()
        if run.session.is_main:
            self._report(outcome, scores, final)
        self.teacher, self.students = None, {}

    def _load_teacher(self) -> Model:
        run, before = self.run, self.assistant
        if before is None:
            return run.teacher
        if not run.invocation.dry_run:
            return _load(self.resolved.recipe, str(before.folder), run.session)
        # A dry run saves no assistant: an untrained one stands in. Its estimate has moved the teacher to the device.
        (one,) = before.planned.values()
        run.teacher.model.cpu()
        assistant = before._initialized(run.teacher, one).model
        source, rows = str(before.folder), run.teacher.rows
        return Model(assistant, run.teacher.tokenizer, source, rows=rows)

    def _initialized(self, teacher: Model, planned: Planned) -> InitializedStudent:
        recipe = planned.recipe
        built = _build(recipe, teacher, planned.shape, self.run.corpus.train)
        if not _is_masked(recipe):
            return built
        return student_with_head(
            teacher.model, built, init=recipe.student.init, seed=recipe.train.seed
        )

    def _build_students(self, teacher: Model) -> dict[str, Student]:
        """Build every student and freeze the weights that its loss does not reach."""
        own, students = self.resolved.recipe, {}
        kernel = relation_kernel(
            own.relation.kernel, self.run.session.device, self.run.session.compute_dtype
        )
        # Variants of one shape start alike: it is fitted once.
        starts = {
            p.shape: self._initialized(teacher, p)
            for p in {p.shape: p for p in self.planned.values()}.values()
        }
        for name, planned in self.planned.items():
            built, recipe = copy.deepcopy(starts[planned.shape]), planned.recipe
            # Random projections are a pure function of the seed too.
            torch.manual_seed(recipe.train.seed)
            objective = build_objective(
                recipe.method, recipe.loss, teacher.shape, planned.shape, kernel=kernel
            )
            fit_projections(objective, teacher.model, built.model, self.run.corpus.train)
            students[name] = Student(built.model, objective)
            for note in (*built.notes, *students[name].objective.notes):
                Progress.log(f"{name}: {note}")
        freeze_unreached(
            students,
            teacher.model,
            self._examples(self.run.corpus.train, teacher).batch(np.arange(1)),
        )
        return students

    def _examples(self, blocks: Examples, teacher: Model) -> Examples:
        """Blocks of text, masked if the method reads masked text."""
        recipe, mask = self.resolved.recipe, self.resolved.recipe.data.mask
        if not _is_masked(recipe):
            return blocks
        tokens = tokens_of(teacher.tokenizer, teacher.source)
        return Masked(blocks, tokens, mask.share, mask.whole_words, mask.static, recipe.train.seed)

    def _scores(self) -> DownstreamScores:
        """Evaluations of the fine-tuned teacher, students, and students copied from the teacher but not distilled."""
        run, recipe, folder = self.run, self.resolved.recipe, self.folder / DOWNSTREAM
        sources: dict[str, str | Path] = {TEACHER: str(recipe.teacher)}
        baselines = {}
        for name, (planned, where) in run.students().items():
            sources |= {f"{name}{AT}{step}": run.kept(name, step) for step in recipe.eval.at}
            sources[name], baselines[name] = where, planned.like + UNDISTILLED
            copied = folder / as_directory(baselines[name]).replace(" ", "-")
            sources[baselines[name]] = copied
            if run.session.is_main and not copied.exists():
                fresh = run.untrained()
                save_model(
                    _build(recipe, fresh, planned.shape, run.corpus.train).model,
                    fresh.tokenizer,
                    copied,
                    fresh.rows,
                )
        run.session.wait()
        seeds = recipe.eval.seeds
        found = scored(
            run.session, run.downstream, sources, folder, seeds=seeds, baselines=baselines
        )
        for name, step in (
            itertools.product(run.students(), recipe.eval.at) if run.session.is_main else ()
        ):
            shutil.rmtree(run.kept(name, step), ignore_errors=True)
        return found

    def _report(self, outcome: Outcome, scores: DownstreamScores, final: bool) -> None:
        """Write the stage's report; the last one also shows the assistant, probes and measures latency."""
        run, recipe, teacher = self.run, self.resolved.recipe, self.run.teacher
        models = [ReportedModel(TEACHER, "teacher", run.card)]
        losses: dict[str, dict[str, float]] = {}
        notes = [
            f"{name}: {note}"
            for name, (task, _) in run.downstream.items()
            for note in task.notes
            if scores.evaluations
        ]
        if self.assistant is not None:
            card = RunResult.read(self.assistant.folder).report.cards[ASSISTANT]
            models.append(ReportedModel(ASSISTANT, "assistant", card, TEACHER))
            notes.append(
                "the held-out losses are against the assistant, from which the student also started; everything else "
                "compares with a student copied from the teacher itself"
            )
        # Stages before this one have saved their students.
        for stage in [
            stage
            for stage in run.stages
            if final and stage is not self and ASSISTANT not in stage.planned
        ]:
            report = RunResult.read(stage.folder).report
            models += [
                ReportedModel(name, "student", report.cards[name], TEACHER)
                for name in stage.planned
            ]
            losses |= report.quality[HELD_OUT]
        folders = {name: self.model_folder(name) for name in self.planned}
        for name, folder in folders.items():
            card = describe(self.students[name].encoder, str(folder), folder)
            role: Role = "assistant" if name == ASSISTANT else "student"
            models.append(ReportedModel(name, role, card, TEACHER, folder))
        sources = {TEACHER: location(teacher.source)} | {
            name: str(folder) for name, folder in folders.items()
        }
        subjects = list(map(Subject, sources, sources.values()))
        probes = self._demo_probes() if final and recipe.data.source == "demo" else {}
        losses |= held_out_losses(RunDir(self.folder), list(self.planned))
        contents = ReportContents(
            "distill",
            recipe,
            models,
            outcome=outcome,
            latency=measure(subjects, recipe.measure, run.session) if final else Latency(),
            evaluations=scores.evaluations,
            comparisons=scores.comparisons,
            quality=quality_of(scores.evaluations) | probes | {HELD_OUT: losses},
            notes=notes,
            auto_class="AutoModelForMaskedLM" if _is_masked(recipe) else "AutoModel",
        )
        write_report(RunDir(self.folder), contents)

    def _demo_probes(self) -> dict[str, dict[str, dict[str, float]]]:
        """Linear probes of the demo tasks: the teacher, every student, and its copy of the teacher before training."""
        fresh = self.run.untrained()
        probes = {TEACHER: probe_demo(fresh.model, fresh.tokenizer)}
        for name, student in self.students.items():
            copied = _build(
                self.resolved.recipe, fresh, self.planned[name].shape, self.run.corpus.train
            ).model
            probes[name] = probe_demo(student.encoder.base_model, fresh.tokenizer)
            probes[name + UNDISTILLED] = probe_demo(copied, fresh.tokenizer)
        return {
            f"{task} probe": {name: p[task] for name, p in probes.items()}
            for task in probes[TEACHER]
        }


def _build(
    recipe: DistillRecipe, teacher: Model, shape: ModelShape, text: Examples
) -> InitializedStudent:
    how = recipe.student.model_dump(include={"init", "layers", "dropout"})
    return build_student(teacher.model.base_model, shape, **how, text=text, seed=recipe.train.seed)


def held_out_losses(run_dir: RunDir, names: list[str]) -> dict[str, dict[str, float]]:
    """Held-out loss and terms of each student, before training (undistilled) and after, from the run's log."""
    records = [r["held_out"] for r in run_dir.read_log() if "held_out" in r]
    quality: dict[str, dict[str, float]] = {}
    for name in names:
        prefix = f"{name}/" if len(names) > 1 else ""
        for label, losses in ((name + UNDISTILLED, records[0]), (name, records[-1])):
            terms = {
                k.removeprefix(prefix): v
                for k, v in losses.items()
                if k.startswith(prefix) and k != "loss"
            }
            quality[label] = {"loss": sum(terms.values())} | terms
    return quality
