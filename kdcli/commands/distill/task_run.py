"""The stages of a task's distillation, run one after another: text, copies, the method's own, prediction."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kdcli.bench.latency import Latency, Subject
from kdcli.commands.distill.augment import augmented
from kdcli.commands.distill.recipes import stage_settings, undistilled_recipe
from kdcli.commands.distill.stages import STUDENT, intermediate, prediction
from kdcli.commands.distill.student import Student
from kdcli.commands.distill.task import START, TaskRun, finetune_recipe
from kdcli.commands.distill.text import HELD_OUT, held_out_losses, probe_text, run_text
from kdcli.data.batches import BucketOrder
from kdcli.downstream.predictions import Features
from kdcli.downstream.run import WEIGHTS, WORST, run_inside
from kdcli.downstream.task import (
    PreparedTask,
    TrainedModel,
    build_job,
    features_of,
    load_model,
    predict,
    quality_of,
    train_job,
)
from kdcli.models.card import describe
from kdcli.models.heads import AUTO_CLASS, TaskModel
from kdcli.models.load import load_encoder, location, save_model
from kdcli.models.shape import build_student, set_dropout
from kdcli.report.dry_run import Estimate, StageEstimate, estimate_stage
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.report.views import TEACHER, UNDISTILLED
from kdcli.teachers.task_teacher import Store, delete_signals, store_in
from kdcli.training.engine import train
from kdcli.training.launch import already_done, claim, claim_or_resume
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.types import Job, Schedule

INTERMEDIATE = "intermediate"
"""Directory of the method's own stage."""

WITHOUT = f"{STUDENT}{UNDISTILLED}"


def run_task(run: TaskRun) -> RunResult | None:
    """Run every stage that is not done in a claimed directory, and report."""
    session = run.task.session
    if already_done(run.folder):
        return RunResult.read(run.folder)
    if run.text is not None:
        claim(run.text, session)
        run_text(run.text)
    _make_start(run)
    of_teacher = predict(session, run.task.evaluator, run.teachers[0])
    evaluations = run.task.evaluator.evaluations(TEACHER, run.task.data.split, of_teacher, WORST)
    both, notes = _with_copies(run)
    source = _intermediate(run, both) if run.stage == "separate" else run.start
    Progress.log(f"{run.recipe.method} on {run.recipe.task}: prediction stage")
    headed = load_model(
        finetune_recipe(run.recipe, source), run.task.data.task, trust_remote_code=run.task.session.trust_remote_code
    )
    task = both if run.recipe.augment.predict else run.task
    fitted = train_job(
        task, headed, *_prediction(run, task, headed, store_in(run.folder, run.recipe.cache_gb)), RunDir(run.folder)
    )
    evaluations += run.task.evaluator.evaluations(STUDENT, run.task.data.split, fitted.predictions, WORST)
    evaluations += _undistilled(run)
    result = None
    if session.is_main:
        delete_signals(run.folder)
        result = _report(run, fitted, evaluations, [*run.task.notes, *notes])
    session.wait()
    return result


def _make_start(run: TaskRun) -> None:
    """Save the student before any stage of the task: a copy of the teacher, where nothing else is to start from."""
    folder = run.folder / START
    if run.start != str(folder) or (folder / WEIGHTS).is_file():
        return
    if run.task.session.is_main:
        settings = run.recipe.student
        built = build_student(
            load_encoder(run.teachers[0].source, trust_remote_code=run.task.session.trust_remote_code).model,
            run.shape,
            init=settings.init,
            layers=settings.layers,
            seed=run.recipe.train.seed,
        )
        for note in built.notes:
            Progress.log(f"{STUDENT}: {note}")
        save_model(built.model, run.teachers[0].tokenizer, folder)
    run.task.session.wait()


def _with_copies(run: TaskRun) -> tuple[PreparedTask, list[str]]:
    """The task with the copies of its examples, where they are wanted."""
    recipe, task, teacher = run.recipe, run.task, run.teachers[0]
    if run.words is None:
        return task, []
    with task.session.accelerator.main_process_first():
        made = augmented(recipe.augment, task, teacher, run.words, seed=recipe.train.seed)
    how = features_of(recipe.data, task.data.task, teacher)
    for note in made.notes:
        Progress.log(note)
    return replace(task, train=Features.of(task.data.task, made.examples, teacher.tokenizer, **how)), made.notes


def _stage_job(run: TaskRun, task: PreparedTask, store: Store | None) -> tuple[Student, Job, Schedule]:
    """Student, job and plan of the method's own stage."""
    recipe = finetune_recipe(run.recipe, run.start).model_copy(update={"train": stage_settings(run.recipe)})
    encoder = load_encoder(run.start, trust_remote_code=task.session.trust_remote_code).model
    if run.recipe.student.dropout is not None:
        set_dropout(encoder, run.recipe.student.dropout)
    return intermediate(task, recipe, encoder, run.objective(), run.teachers[0], store)


def _intermediate(run: TaskRun, task: PreparedTask) -> str:
    """Train the method's own stage; returns where the student is then."""
    folder, main = run.folder / INTERMEDIATE, task.session.is_main
    if claim_or_resume(task.session, folder, run.resolved):
        return str(folder)
    Progress.log(f"{run.recipe.method} on {run.recipe.task}: intermediate stage")
    student, job, schedule = _stage_job(run, task, store_in(run.folder, run.recipe.cache_gb))
    outcome = train(task.session, job, schedule, RunDir(folder))
    if main:
        save_model(student.encoder, run.teachers[0].tokenizer, folder)
        quality = {HELD_OUT: held_out_losses(RunDir(folder), [STUDENT])}
        write_report(
            RunDir(folder),
            command="distill",
            recipe=run.recipe.model_dump(),
            cards=_cards(run, student.encoder, folder),
            folders={STUDENT: folder},
            latency=Latency(),
            outcome=outcome,
            quality=quality,
            notes=list(student.objective.notes),
        )
        delete_signals(run.folder)
    task.session.wait()
    return str(folder)


def _prediction(run: TaskRun, task: PreparedTask, headed: TaskModel, store: Store | None) -> tuple[Job, Schedule]:
    """Job and plan of the prediction stage."""
    joint = run.objective() if run.stage == "joint" else None
    recipe = finetune_recipe(run.recipe, headed.source)
    return prediction(task, recipe, run.recipe.kd, headed, run.teachers, joint, store)


def _undistilled(run: TaskRun) -> list[dict[str, Any]]:
    """What the same student scores when it is fine-tuned without a teacher."""
    if not run.recipe.undistilled.use:
        return []
    folder = run.folder / WITHOUT.replace(" ", "-")
    resolved = undistilled_recipe(run.recipe, run.start)
    found = [e.model_dump() for e in run_inside(run.task, resolved, folder).report.evaluations]
    if run.task.session.is_main:
        # Its report stays; the model is not what was asked for.
        (folder / WEIGHTS).unlink(missing_ok=True)
    return [e | {"model": WITHOUT} for e in found]


def probe_task(run: TaskRun) -> Estimate:
    """Train every stage for a few steps, for what they take, and leave nothing behind.

    A student that is to come out of the stage on text is stood in for by what that stage starts from. How long it takes
    to find candidates for the copies is not known before.
    """
    before = probe_text(run.text).stages if run.text is not None else []
    with tempfile.TemporaryDirectory() as aside:
        run = replace(run, general=None if run.text is not None else run.general)
        cards, found = _probed(replace(run, folder=Path(aside)), run.folder)
    return Estimate(cards, [*before, *found])


def _probed(run: TaskRun, shown: Path) -> tuple[dict[str, dict[str, Any]], list[StageEstimate]]:
    """The models and the stages of the task; `shown` is the directory they would be in."""
    _make_start(run)
    task, recipe, trusted = run.task, run.recipe, run.task.session.trust_remote_code
    headed = load_model(finetune_recipe(recipe, run.start), task.data.task, trust_remote_code=trusted)
    cards = _cards(run, headed.model, None, str(shown))
    alone = undistilled_recipe(recipe, run.start).recipe
    stages: list[tuple[Path, Job, Schedule, bool]] = []
    if run.stage == "separate":
        _, job, schedule = _stage_job(run, task, None)
        stages.append((shown / INTERMEDIATE, job, schedule, stage_settings(recipe).max_steps is None))
    job, schedule = _prediction(run, task, headed, None)
    stages.append((shown, job, schedule, recipe.augment.predict and recipe.train.max_steps is None))
    if recipe.undistilled.use:
        job, schedule = build_job(task, alone, load_model(alone, task.data.task, trust_remote_code=trusted))
        stages.append((shown / WITHOUT.replace(" ", "-"), job, schedule, False))
    found = []
    for folder, job, schedule, of_copies in stages:
        times = 1 + recipe.augment.copies if recipe.augment.use and of_copies else 1
        schedule = replace(schedule, steps=times * schedule.steps)
        assert isinstance(job.order, BucketOrder)
        of_pass = times * job.order.steps_of_pass
        found.append(estimate_stage(task.session, job, schedule, folder, of_pass))
    return cards, found


def _cards(
    run: TaskRun, student: PreTrainedModel, folder: Path | None, name: str | None = None
) -> dict[str, dict[str, Any]]:
    teacher = run.teachers[0]
    where = Path(location(teacher.source))
    return {
        TEACHER: describe(teacher.model, teacher.source, where if where.is_dir() else None),
        STUDENT: describe(student, name or str(folder), folder),
    }


def together(folder: Path, found: Mapping[str, RunResult | None]) -> RunResult:
    """The report that compares the students of several variants with one teacher."""
    cards: dict[str, dict[str, Any]] = {}
    evaluations: list[dict[str, Any]] = []
    recipe: Mapping[str, Any] = {}
    for name, result in found.items():
        assert result is not None
        report = result.report
        recipe = recipe or report.recipe
        for model, shown in ((TEACHER, TEACHER), (STUDENT, name), (WITHOUT, WITHOUT)):
            # The teacher is the same in all; a student without one too, but for how the variant starts it.
            if shown not in (TEACHER, WITHOUT) or shown not in {e["model"] for e in evaluations}:
                evaluations += [e.model_dump() | {"model": shown} for e in report.evaluations if e.model == model]
            if model in report.models and shown not in cards:
                cards[shown] = report.models[model].model_dump()
    return write_report(
        RunDir(folder),
        command="distill",
        recipe=recipe,
        cards=cards,
        folders={},
        latency=Latency(),
        outcome=None,
        quality=quality_of(evaluations),
        notes=[f"{name}: {folder / name}" for name in found],
        evaluations=evaluations,
    )


def _report(run: TaskRun, fitted: TrainedModel, evaluations: list[dict[str, Any]], notes: list[str]) -> RunResult:
    """Save the student and report it beside its teacher and itself undistilled."""
    folder, recipe, task = run.folder, run.recipe, run.task
    save_model(fitted.headed.model, fitted.headed.tokenizer, folder)
    subjects = [Subject(TEACHER, location(run.teachers[0].source)), Subject(STUDENT, str(folder))]
    notes = notes + [f"teacher: {t.source}" for t in run.teachers[1:]]
    if run.general is not None:
        notes.append(f"the student before the task: {run.general}")
    if recipe.undistilled.use:
        notes.append(f"{WITHOUT}: started from the same weights, fine-tuned on the examples without a teacher")
    return write_report(
        RunDir(folder),
        command="distill",
        recipe=recipe.model_dump(),
        cards=_cards(run, fitted.headed.model, folder),
        folders={STUDENT: folder},
        latency=measure(subjects, recipe.measure, task.session),
        outcome=fitted.outcome,
        quality=quality_of(evaluations),
        notes=notes,
        auto_class=AUTO_CLASS[task.data.task.kind].__name__,
        evaluations=evaluations,
    )
