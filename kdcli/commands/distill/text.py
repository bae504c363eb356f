"""Distilling on text: teacher → [assistant →] students, every leg a run of its own.

Data flow of a leg: teacher's signals, once for each batch → the loss of every student → engine → student directories
→ latency, held-out losses, report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdcli.bench.latency import Latency, Subject
from kdcli.commands.distill.assistant import Stage, make_stages, name_of, shapes_of
from kdcli.commands.distill.settings import DistillRecipe
from kdcli.commands.distill.student import Student, distilling, freeze_unreached, needs_of
from kdcli.data.batches import BatchOrder
from kdcli.data.text.corpus import Corpus, open_corpus
from kdcli.data.text.masking import Masked, PassOrder, check_share, tokens_of
from kdcli.downstream.compare import DOWNSTREAM, Tasks, opened, scored
from kdcli.downstream.task import quality_of
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, inputs
from kdcli.losses.hard import labelled
from kdcli.metrics.probe import probe_demo
from kdcli.models.card import describe
from kdcli.models.layout import layout_for
from kdcli.models.load import LoadedModel, load_encoder, location, save_model
from kdcli.models.masked_lm import load_masked_lm, student_with_head
from kdcli.models.shape import InitializedStudent, build_student
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate, StageEstimate, estimate_stage
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.report.views import UNDISTILLED
from kdcli.teachers.teacher import Teacher
from kdcli.training.engine import train
from kdcli.training.launch import already_done, choose_output_dir, claim_or_resume, make_schedule
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session
from kdcli.types import Examples, Job, ModelShape, Outcome, Schedule, real_tokens

HELD_OUT = "held-out loss"
"""Name of the quality row that holds the distillation loss on text never trained on."""


@dataclass(frozen=True)
class TextRun:
    """What all legs of one distillation on text share, and the legs."""

    session: Session
    invocation: Invocation
    teacher: LoadedModel
    corpus: Corpus
    schedule: Schedule
    downstream: Tasks
    stages: list[Stage]

    @property
    def folder(self) -> Path:
        """The output directory, which is that of the last leg."""
        return self.stages[-1].folder

    @property
    def resolved(self) -> Resolved[DistillRecipe]:
        """The recipe of the last leg."""
        return self.stages[-1].resolved


def prepare_text(resolved: Resolved[DistillRecipe], invocation: Invocation, session: Session) -> TextRun:
    """Check everything there is to check, then tokenise the text where that was not done before; claims nothing.

    Raises:
        KdcliError: see `kdcli.errors`; the recipe, models or data cannot be used.
    """
    recipe = resolved.recipe
    check_text(recipe)
    teacher = _load(recipe, str(recipe.teacher), trust_remote_code=invocation.trust_remote_code)
    if _is_masked(recipe):
        check_share(recipe.data.mask.share)
        tokens_of(teacher.tokenizer, teacher.source)
    stages = _legs(resolved, invocation, session, teacher)
    # Before the corpus, which may take hours to tokenise.
    tasks = opened(recipe.eval, str(recipe.teacher), recipe.train.seed, invocation, session)
    with session.accelerator.main_process_first():
        corpus = open_corpus(
            recipe.data.source,
            teacher.tokenizer,
            max_length=recipe.data.max_length,
            column=recipe.data.column,
            isolated=recipe.data.pack_isolated,
            held_out_blocks=recipe.data.held_out_blocks,
            log=Progress.log,
        )
    schedule = make_schedule(recipe.train, len(corpus.train) / recipe.train.batch_size)
    return TextRun(session, invocation, teacher, corpus, schedule, tasks, stages)


def _is_masked(recipe: DistillRecipe) -> bool:
    return "masked" in inputs(recipe.method)


def _load(recipe: DistillRecipe, source: str, *, trust_remote_code: bool) -> LoadedModel:
    """An encoder, under its masked-language-model head where the method reads masked text."""
    if not _is_masked(recipe):
        return load_encoder(source, trust_remote_code=trust_remote_code)
    otherwise = "methods that need no masked-language-model head: minilm, minilmv2, tinybert"
    return load_masked_lm(source, otherwise=otherwise, trust_remote_code=trust_remote_code)


def check_text(recipe: DistillRecipe) -> None:
    """Check what needs no model and no data.

    Raises:
        UsageError: no teacher, no shape, an unknown method or key.
    """
    if recipe.teacher is None:
        raise UsageError(
            "no teacher given", "kdcli distill TEACHER --to LxH; TEACHER is a hub id, a directory or 'demo'"
        )
    if not recipe.student.to:
        raise UsageError("no student shape given", "add --to LxH, for example --to 6x384")
    check_settings(recipe.method, recipe.loss)
    if not inputs(recipe.method) & {"text", "masked"}:
        raise UsageError(f"method {recipe.method} learns from a task's examples, not from text", "add --task TASK")


def _legs(
    resolved: Resolved[DistillRecipe], invocation: Invocation, session: Session, teacher: LoadedModel
) -> list[Stage]:
    """The chain of this invocation; whatever a later leg would stumble over is found before the first one starts."""
    recipe = resolved.recipe
    leaks = layout_for(teacher.model.config).leaks
    if recipe.data.pack_isolated and leaks:
        raise UsageError(
            f"data.pack_isolated: {teacher.model.config.model_type} cannot keep documents apart: {leaks}",
            "set data.pack_isolated=false",
        )
    shapes = shapes_of(recipe, teacher.shape)
    folder = choose_output_dir(name_of(teacher.source, teacher.shape, shapes), resolved, invocation, session)
    stages = make_stages(resolved, teacher.shape, shapes, folder)
    above = teacher.shape
    for leg in stages:
        for shape in leg.shapes.values():
            try:
                build_objective(recipe.method, recipe.loss, above, shape)
            except UsageError as error:
                if leg is stages[-1]:
                    raise
                raise error.of(f"the teacher assistant {shape}", "--assistant none leaves it out") from None
        above = next(iter(leg.shapes.values()))
    return stages


def run_text(context: TextRun) -> RunResult | None:
    """Train, save and report leg after leg in a claimed directory; only the main process writes."""
    session, invocation, stages = context.session, context.invocation, context.stages
    last = stages[-1]
    result: RunResult | None = None
    for leg in stages:
        run_dir = RunDir(leg.folder)
        # A leg before the last lives in the chain's directory and goes on whenever the chain does.
        inside = leg is not last
        if claim_or_resume(session, leg.folder, leg.resolved) if inside else already_done(leg.folder):
            result = RunResult.read(leg.folder)
            continue
        of_leg = context.teacher
        if leg is not stages[0]:
            of_leg = _load(leg.resolved.recipe, leg.teacher, trust_remote_code=invocation.trust_remote_code)
        students = _students(leg, of_leg, context.corpus)
        outcome = train(session, _job(context, leg, students, of_leg), context.schedule, run_dir)
        if session.is_main:
            for name, student in students.items():
                save_model(student.encoder, of_leg.tokenizer, leg.model_folder(name))
        session.wait()
        scores = _scores(context, leg) if leg is last else []
        if session.is_main:
            result = _report(context, leg, leg is last, result, of_leg, students, outcome, scores)
        session.wait()
    return result if session.is_main else None


def _students(leg: Stage, teacher: LoadedModel, corpus: Corpus) -> dict[str, Student]:
    """Build every student and take what its loss does not reach out of the training."""
    recipe = leg.resolved.recipe
    students = {}
    for name, shape in leg.shapes.items():
        built = _build(recipe, teacher, shape)
        if _is_masked(recipe):
            built = student_with_head(teacher.model, built, init=recipe.student.init, seed=recipe.train.seed)
        for note in built.notes:
            Progress.log(f"{name}: {note}")
        # The projections of a loss are random: they too are a pure function of the seed.
        torch.manual_seed(recipe.train.seed)
        students[name] = Student(built.model, build_objective(recipe.method, recipe.loss, teacher.shape, shape))
        for note in students[name].objective.notes:
            Progress.log(f"{name}: {note}")
    freeze_unreached(students, teacher.model, _examples(recipe, corpus.train, teacher).batch(np.arange(1)))
    return students


def _examples(recipe: DistillRecipe, blocks: Examples, teacher: LoadedModel) -> Examples:
    """Blocks of text, masked where the method wants that."""
    mask = recipe.data.mask
    if not _is_masked(recipe):
        return blocks
    tokens = tokens_of(teacher.tokenizer, teacher.source)
    return Masked(blocks, tokens, mask.share, mask.whole_words, mask.static, recipe.train.seed)


def _job(context: TextRun, leg: Stage, students: Mapping[str, Student], teacher: LoadedModel) -> Job:
    corpus, schedule, recipe = context.corpus, context.schedule, leg.resolved.recipe
    frozen = Teacher.frozen(teacher.source, teacher.model, needs_of(students), context.session)
    blocks = BatchOrder(len(corpus.train), schedule.batch_size, schedule.seed)
    masked = _is_masked(recipe)
    return distilling(
        students,
        frozen.signals,
        _examples(recipe, corpus.train, teacher),
        PassOrder(blocks) if masked else blocks,
        _examples(recipe, corpus.held_out, teacher),
        (lambda batch: labelled("tokens", batch["labels"])) if masked else real_tokens,
    )


def _build(recipe: DistillRecipe, teacher: LoadedModel, shape: ModelShape) -> InitializedStudent:
    settings = recipe.student
    return build_student(
        teacher.model.base_model,
        shape,
        init=settings.init,
        layers=settings.layers,
        dropout=settings.dropout,
        seed=recipe.train.seed,
    )


def _scores(context: TextRun, leg: Stage) -> list[dict[str, Any]]:
    """Evaluations of teacher, students and undistilled students, each fine-tuned alike in a run of its own.

    The undistilled student is copied from the teacher itself, also where the student learnt from an assistant.
    """
    recipe, folder = leg.resolved.recipe, leg.folder / DOWNSTREAM
    sources = {"teacher": str(recipe.teacher)} if context.downstream else {}
    for name in leg.shapes if context.downstream else ():
        sources[name] = str(leg.model_folder(name))
        copied = folder / f"{name}{UNDISTILLED}".replace(" ", "-").replace(":", "_")
        sources[name + UNDISTILLED] = str(copied)
        if context.session.is_main and not copied.exists():
            fresh = load_encoder(str(recipe.teacher), trust_remote_code=context.invocation.trust_remote_code)
            save_model(_build(recipe, fresh, leg.shapes[name]).model, fresh.tokenizer, copied)
    context.session.wait()
    return scored(context.session, context.downstream, sources, folder)


def _report(
    context: TextRun,
    leg: Stage,
    final: bool,
    earlier: RunResult | None,
    of_leg: LoadedModel,
    students: Mapping[str, Student],
    outcome: Outcome,
    scores: list[dict[str, Any]],
) -> RunResult:
    """The report of a leg; that of the last one also shows the assistant, probes and measures latency."""
    recipe, teacher, run_dir = leg.resolved.recipe, context.teacher, RunDir(leg.folder)
    source = location(teacher.source)
    cards = {"teacher": describe(teacher.model, teacher.source, Path(source) if Path(source).is_dir() else None)}
    if earlier:
        cards |= {"assistant": earlier.report.models["assistant"].model_dump()}
    folders = {name: leg.model_folder(name) for name in students}
    for name, student in students.items():
        cards[name] = describe(student.encoder, str(folders[name]), folders[name])
    latency = Latency()
    if final:
        subjects = [Subject("teacher", source), *(Subject(name, str(folder)) for name, folder in folders.items())]
        latency = measure(subjects, recipe.measure, context.session)
    quality = {HELD_OUT: held_out_losses(run_dir, list(students))}
    if final and recipe.data.source == "demo":
        quality = _demo_quality(recipe, leg, teacher, students) | quality
    quality = quality_of(scores) | quality
    notes = [f"{name}: {note}" for name, (task, _) in context.downstream.items() for note in task.notes if scores]
    if teacher.source != of_leg.source:
        notes.append(
            "the held-out losses are against the assistant, from which the student also started; everything else "
            "compares with a student copied from the teacher itself"
        )
    return write_report(
        run_dir,
        command="distill",
        recipe=recipe.model_dump(),
        cards=cards,
        folders=folders,
        latency=latency,
        outcome=outcome,
        quality=quality,
        notes=notes,
        auto_class=("AutoModelForMaskedLM" if _is_masked(recipe) else "AutoModel"),
        evaluations=scores,
    )


def held_out_losses(run_dir: RunDir, names: list[str]) -> dict[str, dict[str, float]]:
    """The losses of each student on what it was not trained on, before training and after, with their terms."""
    found = [r["held_out"] for r in run_dir.read_log() if "held_out" in r]
    quality: dict[str, dict[str, float]] = {}
    for name in names:
        for label, losses in ((name + UNDISTILLED, found[0]), (name, found[-1])):
            own = (
                losses
                if len(names) == 1
                else {k.split("/", 1)[1]: v for k, v in losses.items() if k.startswith(f"{name}/")}
            )
            terms = {k: v for k, v in own.items() if k != "loss"}
            quality[label] = {"loss": sum(terms.values())} | terms
    return quality


def _demo_quality(
    recipe: DistillRecipe, leg: Stage, teacher: LoadedModel, students: Mapping[str, Student]
) -> dict[str, dict[str, dict[str, float]]]:
    """Linear probes of the demo tasks: the teacher, every student, and what copying the teacher alone would give."""
    fresh = load_encoder(teacher.source)
    probes = {"teacher": probe_demo(fresh.model, fresh.tokenizer)}
    for name, student in students.items():
        copied = _build(recipe, fresh, leg.shapes[name]).model
        probes[name] = probe_demo(student.encoder.base_model, fresh.tokenizer)
        probes[name + UNDISTILLED] = probe_demo(copied, fresh.tokenizer)
    tasks = next(iter(probes.values()))
    return {f"{task} probe": {name: of[task] for name, of in probes.items()} for task in tasks}


def probe_text(context: TextRun) -> Estimate:
    """Train every leg for a few steps, for what they take, and leave nothing behind.

    The teacher's stand-in for a leg after an assistant is the assistant as it is before training.
    """
    schedule, teacher = context.schedule, context.teacher
    stages = context.stages
    found: list[StageEstimate] = []
    cards = {"teacher": describe(teacher.model, teacher.source, None)}
    for leg in stages:
        students = _students(leg, teacher, context.corpus)
        job = _job(context, leg, students, teacher)
        passes = len(context.corpus.train) / schedule.batch_size
        found.append(estimate_stage(context.session, job, schedule, leg.folder, passes))
        cards |= {name: describe(s.encoder, str(leg.model_folder(name)), None) for name, s in students.items()}
        first = next(iter(students.values())).encoder
        teacher = LoadedModel(first, teacher.tokenizer, next(iter(leg.shapes.values())), str(leg.folder))
    return Estimate(cards, found)
