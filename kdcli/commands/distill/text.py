"""Distilling on text: teacher -> [assistant ->] students, each stage a run of its own.

A batch of token ids -> the teacher's signals, once -> the loss of every student -> engine -> saved students -> report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kdcli.bench.latency import Subject
from kdcli.commands.distill.settings import DistillRecipe
from kdcli.commands.distill.student import Student, distill_job, freeze_unreached, relation_kernel, teacher_needs
from kdcli.data.batches import BatchOrder
from kdcli.data.text.corpus import Corpus, open_corpus
from kdcli.data.text.masking import Masked, PassOrder, check_share, tokens_of
from kdcli.downstream.compare import DOWNSTREAM, Tasks, check_tasks, opened, scored
from kdcli.errors import UsageError
from kdcli.losses import build_objective, check_settings, inputs, masks_text
from kdcli.metrics.probe import probe_demo
from kdcli.models.card import describe, describe_source
from kdcli.models.layout import layout_for
from kdcli.models.load import LoadedModel, load_config, load_encoder, load_tokenizer, location, save_model
from kdcli.models.masked_lm import load_masked_lm, student_with_head
from kdcli.models.shape import InitializedStudent, build_student, parse_shape, shape_of
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.finish import RunResult, measure, quality_of, write_report
from kdcli.report.schema import ASSISTANT, TEACHER, UNDISTILLED
from kdcli.report.stages import StageJob
from kdcli.teachers.teacher import Teacher
from kdcli.training.launch import Session, check_machine, choose_output_dir, make_schedule
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.types import Examples, ModelShape, Outcome, Schedule

HELD_OUT = "held-out loss"  # Quality row of the distillation loss on held-out text


@dataclass(frozen=True)
class TextRun:
    """A distillation on text, checked and tokenised; its stages share these."""

    resolved: Resolved[DistillRecipe]
    invocation: Invocation
    folder: Path
    session: Session
    teacher: LoadedModel
    corpus: Corpus
    schedule: Schedule
    downstream: Tasks
    stages: "list[TextStage]"

    def report(self) -> None:
        """The last stage wrote it."""


def check_text(recipe: DistillRecipe) -> None:
    """Raise a `UsageError` for a mistake in the recipe alone, before models and data are read."""
    if recipe.teacher is None:
        raise UsageError(
            "no teacher given", "kdcli distill TEACHER --to LxH; TEACHER is a hub id, a directory or 'demo'"
        )
    if not recipe.student.to:
        raise UsageError("no student shape given", "add --to LxH, for example --to 6x384")
    check_settings(recipe.method, recipe.loss)
    if not inputs(recipe.method) & {"text", "masked"}:
        raise UsageError(f"method {recipe.method} learns from a task's examples, not from text", "add --task TASK")


def read_text(recipe: DistillRecipe, invocation: Invocation) -> None:
    """Check what needs no weights, then tokenise the text unless it is cached. Called before the processes join: it may
    take hours, and a group in which all wait for one ends after minutes. Raises KdcliError: as `prepare_text`."""
    check_text(recipe)
    relation_kernel(recipe.relation.kernel, *check_machine(recipe.train.dtype, invocation))
    source, trusted = str(recipe.teacher), invocation.trust_remote_code
    config = load_config(source, trust_remote_code=trusted)
    check_shapes(recipe, config)
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


def check_shapes(recipe: DistillRecipe, config: Any) -> dict[str, ModelShape]:
    """The students' shapes by name. Raises UsageError: the teacher cannot keep documents apart, or it or its assistant
    cannot teach one of these shapes."""
    leaks, teacher = layout_for(config).leaks, shape_of(config)
    if recipe.data.pack_isolated and leaks:
        raise UsageError(
            f"data.pack_isolated: {config.model_type} cannot keep documents apart: {leaks}",
            "set data.pack_isolated=false",
        )
    shapes = student_shapes(recipe, teacher)
    assistant = assistant_shape(recipe, teacher, shapes)
    if assistant is not None:
        try:
            build_objective(recipe.method, recipe.loss, teacher, assistant)
        except UsageError as error:
            raise error.of(f"the teacher assistant {assistant}", "--assistant none leaves it out") from None
    for name, shape in shapes.items():
        if assistant is not None and (shape.layers > assistant.layers or shape.hidden > assistant.hidden):
            raise UsageError(
                f"the {shape} of '{name}' is larger than its teacher assistant {assistant}",
                "give an --assistant that is at least as deep and wide, or none",
            )
        build_objective(recipe.method, recipe.loss, assistant or teacher, shape)
    return shapes


def prepare_text(resolved: Resolved[DistillRecipe], invocation: Invocation, session: Session) -> TextRun:
    """Check everything and open the text, which `read_text` has tokenised; claims nothing. Raises KdcliError: the
    recipe, models or data cannot be used."""
    recipe = resolved.recipe
    teacher = _load(recipe, str(recipe.teacher), session)
    shapes = check_shapes(recipe, teacher.model.config)
    name = f"{Path(teacher.source).name}-{'+'.join(short_name(s, teacher.shape) for s in shapes.values())}"
    folder = choose_output_dir(as_directory(f"distill-{name}"), resolved, invocation, session)
    assistant = assistant_shape(recipe, teacher.shape, shapes)
    tasks: Tasks = {}
    if recipe.eval.tasks:
        tasks = opened(recipe.eval, str(recipe.teacher), recipe.train.seed, invocation, session)
    corpus = _corpus(recipe, teacher.tokenizer)
    schedule = make_schedule(recipe.train, len(corpus.train) / recipe.train.batch_size)
    run = TextRun(resolved, invocation, folder, session, teacher, corpus, schedule, tasks, [])
    if assistant is not None:
        short = short_name(assistant, teacher.shape)
        inside = folder / f"assistant-{as_directory(short)}"
        run.stages.append(TextStage(run, inside, assistant_recipe(resolved, short), {ASSISTANT: assistant}))
    run.stages.append(TextStage(run, folder, resolved, shapes, run.stages[0] if assistant else None))
    return run


def _is_masked(recipe: DistillRecipe) -> bool:
    return masks_text(recipe.method, recipe.loss)


def _load(recipe: DistillRecipe, source: str, session: Session) -> LoadedModel:
    """An encoder, with its masked-language-model head if the loss reads masked text."""
    if not _is_masked(recipe):
        return load_encoder(source, trust_remote_code=session.trust_remote_code)
    # A teacher whose predictions are not learned needs no head.
    bare = "masked" not in inputs(recipe.method)
    otherwise = "methods that need no masked-language-model head: minilm, minilmv2, tinybert"
    otherwise = "set loss.masked_lm_weight=0" if bare else otherwise
    return load_masked_lm(source, otherwise=otherwise, bare=bare, trust_remote_code=session.trust_remote_code)


@dataclass(eq=False)
class TextStage:
    """The training of all students, or of their assistant, against one teacher. `assistant` is the stage before, whose
    student is this one's teacher. `teacher` and `students` are set by `build`."""

    run: TextRun
    folder: Path
    resolved: Resolved[DistillRecipe]
    shapes: Mapping[str, ModelShape]
    assistant: "TextStage | None" = None
    teacher: LoadedModel | None = None
    students: dict[str, Student] = field(default_factory=dict)

    def model_folder(self, name: str) -> Path:
        """Where a student is saved: the run directory, or with several students one directory each."""
        return self.folder if len(self.shapes) == 1 else self.folder / as_directory(name)

    def build(self) -> StageJob:
        run, corpus, schedule, masked = self.run, self.run.corpus, self.run.schedule, _is_masked(self.resolved.recipe)
        self.teacher = teacher = self._load_teacher()
        self.students = students = self._build_students(teacher)
        cards = {}
        if run.invocation.dry_run:
            cards = {TEACHER: describe(teacher.model, teacher.source, None)} if self.assistant is None else {}
            cards |= {name: describe(s.encoder, str(self.model_folder(name)), None) for name, s in students.items()}
        blocks = BatchOrder(len(corpus.train), schedule.batch_size, schedule.seed)
        signals = Teacher.of_every_step(teacher.source, teacher.model, teacher_needs(students), run.session).signals
        train, held_out = (self._examples(part, teacher) for part in (corpus.train, corpus.held_out))
        job = distill_job(students, signals, train, PassOrder(blocks) if masked else blocks, held_out)
        return StageJob(job, schedule, len(corpus.train) / schedule.batch_size, cards)

    def finish(self, outcome: Outcome) -> None:
        run, teacher = self.run, self.teacher
        assert teacher is not None
        for name, student in self.students.items() if run.session.is_main else ():
            save_model(student.encoder, teacher.tokenizer, self.model_folder(name), teacher.rows)
        run.session.wait()
        final = self is run.stages[-1]
        scores = self._scores() if final and run.downstream else []
        if run.session.is_main:
            self._report(outcome, scores, final)
        self.teacher, self.students = None, {}

    def _load_teacher(self) -> LoadedModel:
        run, before = self.run, self.assistant
        if before is None:
            return run.teacher
        if not run.invocation.dry_run:
            return _load(self.resolved.recipe, str(before.folder), run.session)
        # A dry run saves no assistant: an untrained one stands in. Its estimate has moved the teacher to the device.
        (shape,) = before.shapes.values()
        run.teacher.model.cpu()
        assistant = before._initialized(run.teacher, shape).model
        return LoadedModel(assistant, run.teacher.tokenizer, shape, str(before.folder), run.teacher.rows)

    def _initialized(self, teacher: LoadedModel, shape: ModelShape) -> InitializedStudent:
        recipe = self.resolved.recipe
        built = _build(recipe, teacher, shape)
        if not _is_masked(recipe):
            return built
        return student_with_head(teacher.model, built, init=recipe.student.init, seed=recipe.train.seed)

    def _build_students(self, teacher: LoadedModel) -> dict[str, Student]:
        """Build every student and freeze the weights that its loss does not reach."""
        recipe, students = self.resolved.recipe, {}
        kernel = relation_kernel(recipe.relation.kernel, self.run.session.device, self.run.session.compute_dtype)
        for name, shape in self.shapes.items():
            built = self._initialized(teacher, shape)
            # The projections of a loss are random: they too are a pure function of the seed.
            torch.manual_seed(recipe.train.seed)
            objective = build_objective(recipe.method, recipe.loss, teacher.shape, shape, kernel=kernel)
            students[name] = Student(built.model, objective)
            for note in (*built.notes, *students[name].objective.notes):
                Progress.log(f"{name}: {note}")
        freeze_unreached(students, teacher.model, self._examples(self.run.corpus.train, teacher).batch(np.arange(1)))
        return students

    def _examples(self, blocks: Examples, teacher: LoadedModel) -> Examples:
        """Blocks of text, masked if the method reads masked text."""
        recipe, mask = self.resolved.recipe, self.resolved.recipe.data.mask
        if not _is_masked(recipe):
            return blocks
        tokens = tokens_of(teacher.tokenizer, teacher.source)
        return Masked(blocks, tokens, mask.share, mask.whole_words, mask.static, recipe.train.seed)

    def _scores(self) -> list[dict[str, Any]]:
        """Evaluations of the fine-tuned teacher, students, and students copied from the teacher but not distilled."""
        run, recipe, folder = self.run, self.resolved.recipe, self.folder / DOWNSTREAM
        sources: dict[str, str | Path] = {TEACHER: str(recipe.teacher)}
        for name, shape in self.shapes.items():
            sources[name] = self.model_folder(name)
            copied = folder / as_directory(f"{name}{UNDISTILLED}".replace(" ", "-"))
            sources[name + UNDISTILLED] = copied
            if run.session.is_main and not copied.exists():
                fresh = load_encoder(str(recipe.teacher), trust_remote_code=run.session.trust_remote_code)
                save_model(_build(recipe, fresh, shape).model, fresh.tokenizer, copied, fresh.rows)
        run.session.wait()
        return scored(run.session, run.downstream, sources, folder)

    def _report(self, outcome: Outcome, scores: list[dict[str, Any]], final: bool) -> None:
        """Write the stage's report; the last one also shows the assistant, probes and measures latency."""
        run, recipe, teacher = self.run, self.resolved.recipe, self.run.teacher
        cards = {TEACHER: describe_source(teacher.model, teacher.source)}
        notes = [f"{name}: {note}" for name, (task, _) in run.downstream.items() for note in task.notes if scores]
        if self.assistant is not None:
            cards[ASSISTANT] = RunResult.read(self.assistant.folder).report.models[ASSISTANT].model_dump()
            notes.append(
                "the held-out losses are against the assistant, from which the student also started; everything else "
                "compares with a student copied from the teacher itself"
            )
        folders = {name: self.model_folder(name) for name in self.shapes}
        cards |= {name: describe(self.students[name].encoder, str(f), f) for name, f in folders.items()}
        sources = {TEACHER: location(teacher.source)} | {name: str(folder) for name, folder in folders.items()}
        subjects = list(map(Subject, sources, sources.values()))
        contents: dict[str, Any] = {"cards": cards, "folders": folders, "outcome": outcome, "notes": notes}
        contents["latency"] = measure(subjects, recipe.measure, run.session) if final else None
        probes = self._demo_probes() if final and recipe.data.source == "demo" else {}
        losses = held_out_losses(RunDir(self.folder), list(self.shapes))
        contents |= {"evaluations": scores, "quality": quality_of(scores) | probes | {HELD_OUT: losses}}
        contents["auto_class"] = "AutoModelForMaskedLM" if _is_masked(recipe) else "AutoModel"
        write_report(RunDir(self.folder), command="distill", recipe=recipe.model_dump(), **contents)

    def _demo_probes(self) -> dict[str, dict[str, dict[str, float]]]:
        """Linear probes of the demo tasks: the teacher, every student, and its copy of the teacher before training."""
        fresh = load_encoder(self.run.teacher.source)
        probes = {TEACHER: probe_demo(fresh.model, fresh.tokenizer)}
        for name, student in self.students.items():
            copied = _build(self.resolved.recipe, fresh, self.shapes[name]).model
            probes[name] = probe_demo(student.encoder.base_model, fresh.tokenizer)
            probes[name + UNDISTILLED] = probe_demo(copied, fresh.tokenizer)
        return {f"{task} probe": {name: p[task] for name, p in probes.items()} for task in probes[TEACHER]}


def _build(recipe: DistillRecipe, teacher: LoadedModel, shape: ModelShape) -> InitializedStudent:
    how = recipe.student.model_dump(include={"init", "layers", "dropout"})
    return build_student(teacher.model.base_model, shape, **how, seed=recipe.train.seed)


def held_out_losses(run_dir: RunDir, names: list[str]) -> dict[str, dict[str, float]]:
    """Held-out loss and terms of each student, before training (undistilled) and after, from the run's log."""
    records = [r["held_out"] for r in run_dir.read_log() if "held_out" in r]
    quality: dict[str, dict[str, float]] = {}
    for name in names:
        prefix = f"{name}/" if len(names) > 1 else ""
        for label, losses in ((name + UNDISTILLED, records[0]), (name, records[-1])):
            terms = {k.removeprefix(prefix): v for k, v in losses.items() if k.startswith(prefix) and k != "loss"}
            quality[label] = {"loss": sum(terms.values())} | terms
    return quality


def student_shapes(recipe: DistillRecipe, teacher: ModelShape) -> dict[str, ModelShape]:
    """The students' shapes by name in the report: `student`, or with several students the shape as given."""
    texts = recipe.student.to
    if len(set(texts)) < len(texts):
        raise UsageError(f"--to names a shape twice: {', '.join(texts)}")
    parsed = {text: parse_shape(text, teacher) for text in texts}
    return parsed if len(parsed) > 1 else {"student": next(iter(parsed.values()))}


def assistant_shape(
    recipe: DistillRecipe, teacher: ModelShape, students: Mapping[str, ModelShape]
) -> ModelShape | None:
    """The shape of the teacher assistant that all students learn from, if they need one (MiniLM, arXiv 2002.10957,
    section 3.3). A student with at most half the teacher's layers and half its width learns better from an assistant,
    which has the teacher's layers and the student's width and learnt from the teacher."""
    if recipe.assistant == "none":
        return None
    if recipe.assistant != "auto":
        return parse_shape(recipe.assistant, teacher)
    needed: dict[str, ModelShape | None] = dict.fromkeys(students)
    for name, shape in students.items():
        if 2 * shape.layers <= teacher.layers and 2 * shape.hidden <= teacher.hidden:
            needed[name] = replace(shape, layers=teacher.layers)
    if len(set(needed.values())) > 1:
        listed = "; ".join(f"{name}: {shape or 'none'}" for name, shape in needed.items())
        raise UsageError(
            f"the students need different teacher assistants ({listed}), so one teacher pass cannot serve them",
            "distil them one by one, or give one --assistant for all (none, or LxH)",
        )
    return next(iter(needed.values()))


def assistant_recipe(resolved: Resolved[DistillRecipe], short: str) -> Resolved[DistillRecipe]:
    """The recipe that alone repeats the assistant's stage; `short` is its shape."""
    recipe = resolved.recipe
    student = recipe.student.model_copy(update={"to": [short], "layers": None})
    origins = dict(resolved.origins) | {"student.to": "teacher assistant", "assistant": "teacher assistant"}
    return Resolved(recipe.model_copy(update={"student": student, "assistant": "none"}), origins)


def short_name(shape: ModelShape, teacher: ModelShape) -> str:
    """A shape without the parts that the grammar fills in: `6x384` for `6x384:1536@12`."""
    ffn = "" if shape.ffn == round(shape.hidden * teacher.ffn / teacher.hidden) else f":{shape.ffn}"
    heads = "" if shape.heads == teacher.heads else f"@{shape.heads}"
    return f"{shape.layers}x{shape.hidden}{ffn}{heads}"


def as_directory(name: str) -> str:
    """A name for a directory; some file systems refuse ':'."""
    return name.replace(":", "_")
