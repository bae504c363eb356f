"""Co-training on a task: two models fine-tuned in one loop that learn from each other's logits, both judged."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdcli.bench.latency import Latency, Subject
from kdcli.commands.cotrain.job import finetune_recipe, on_task
from kdcli.commands.cotrain.plan import ROLES, STANDALONE, due_alone, name_of, standalone
from kdcli.commands.cotrain.settings import CotrainTaskRecipe
from kdcli.data.batches import BucketOrder
from kdcli.downstream.run import WORST
from kdcli.downstream.task import PreparedTask, load_model, order_and_schedule, predict, prepare, quality_of
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT, TEACHER
from kdcli.models.card import describe
from kdcli.models.heads import AUTO_CLASS, TaskModel
from kdcli.models.load import load_encoder, save_model
from kdcli.models.shape import build_student, is_shape, parse_shape
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate, StageEstimate, estimate_stage
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.teachers.task_teacher import check_vocabulary
from kdcli.training.engine import train
from kdcli.training.launch import already_done, choose_output_dir, claim_or_resume
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session
from kdcli.types import Outcome


@dataclass(frozen=True)
class TaskPairRun:
    """Co-training on a task, checked and ready to run."""

    resolved: Resolved[CotrainTaskRecipe]
    invocation: Invocation
    task: PreparedTask
    folder: Path

    @property
    def recipe(self) -> CotrainTaskRecipe:
        """What to do."""
        return self.resolved.recipe


def check_task_pair(recipe: CotrainTaskRecipe) -> None:
    """Check what needs no model and no data beyond `check_pair`.

    Raises:
        UsageError: no task; a shape that there is nothing to copy from.
    """
    if recipe.task is None:
        raise UsageError("no task given", "add --task, for example --task sst2, or --task own for your own files")
    if recipe.base is None and is_shape(str(recipe.teacher)):
        raise UsageError(
            f"on a task the teacher {recipe.teacher} would start from nothing",
            "give a model in its place, or --base MODEL, from which shapes are copied",
        )


def prepare_task_pair(resolved: Resolved[CotrainTaskRecipe], invocation: Invocation, session: Session) -> TaskPairRun:
    """Check models and data against each other and tokenise; claims nothing.

    Raises:
        KdcliError: see `kdcli.errors`; the recipe, models or data cannot be used.
    """
    recipe, trusted = resolved.recipe, invocation.trust_remote_code
    folder = choose_output_dir(name_of(recipe), resolved, invocation, session)
    given = {role: source for role in ROLES if not is_shape(source := str(getattr(recipe, role)))}
    first = given.get(TEACHER) or str(recipe.base)
    of_first = finetune_recipe(recipe, first, label_map=TEACHER in given)
    task, headed = prepare(of_first, session, trust_remote_code=trusted)
    if STUDENT in given:
        student = load_model(finetune_recipe(recipe, given[STUDENT]), task.data.task, trust_remote_code=trusted)
        check_vocabulary(headed, student.tokenizer, given[STUDENT])
    run = TaskPairRun(resolved, invocation, task, folder)
    if len(given) < len(ROLES):
        base = load_encoder(_base(recipe), trust_remote_code=trusted)
        check_vocabulary(headed, base.tokenizer, base.source)
        for role in ROLES:
            if role not in given:
                parse_shape(str(getattr(recipe, role)), base.shape)
    order_and_schedule(task, of_first)
    return run


def _base(recipe: CotrainTaskRecipe) -> str:
    """What shapes are copied from."""
    return recipe.base or str(recipe.teacher)


def run_task_pair(run: TaskPairRun) -> RunResult | None:
    """Train both models, then both without each other, evaluator and report, in a claimed directory."""
    if already_done(run.folder):
        return RunResult.read(run.folder)
    models, outcome, evaluations = _fit(run, run.recipe, run.folder)
    folders = {name: run.folder / name for name in ROLES}
    alone = _standalone(run)
    if alone is not None:
        evaluations += [e.model_dump() | {"model": f"{e.model} {STANDALONE}"} for e in alone.report.evaluations]
    result = None
    if run.task.session.is_main:
        own = _cards(folders, models)
        cards = {TEACHER: own[TEACHER]}
        if alone is not None:
            cards |= {f"{name} {STANDALONE}": card.model_dump() for name, card in alone.report.models.items()}
        # The student last: it is what the report's first numbers are about.
        cards[STUDENT] = own[STUDENT]
        latency = measure(
            [Subject(name, str(folder)) for name, folder in folders.items()],
            run.recipe.measure,
            run.task.session,
        )
        result = _finished(run, run.recipe, run.folder, folders, outcome, cards, evaluations, latency, alone)
    run.task.session.wait()
    return result


def _headed(run: TaskPairRun) -> dict[str, TaskModel]:
    """Both models as they start; shapes are copied from the base."""
    recipe, task, trusted = run.recipe, run.task.data.task, run.task.session.trust_remote_code
    found = {}
    for number, role in enumerate(ROLES):
        source = str(getattr(recipe, role))
        if not is_shape(source):
            of_role = finetune_recipe(recipe, source, label_map=role == TEACHER)
            found[role] = load_model(of_role, task, trust_remote_code=trusted)
            continue
        base = load_encoder(_base(recipe), trust_remote_code=trusted)
        built = build_student(base.model, parse_shape(source, base.shape), seed=2 * recipe.train.seed + number)
        for note in built.notes:
            Progress.log(f"{role}: {note}")
        with tempfile.TemporaryDirectory() as aside:
            save_model(built.model, base.tokenizer, Path(aside))
            headed = load_model(finetune_recipe(recipe, aside), task, trust_remote_code=trusted)
        found[role] = replace(headed, source=source)
    return found


def _fit(
    run: TaskPairRun, recipe: CotrainTaskRecipe, folder: Path
) -> tuple[dict[str, TaskModel], Outcome, list[dict[str, Any]]]:
    """Train both in a claimed directory, on from its last checkpoint; save and judge them."""
    task = run.task
    models = _headed(run)
    job, schedule = on_task(task, recipe, models)
    outcome = train(task.session, job, schedule, RunDir(folder))
    evaluations = []
    for name, headed in models.items():
        # It tells whoever uses the model at how many tokens rows were cut.
        headed.tokenizer.model_max_length = task.max_length
        if task.session.is_main:
            save_model(headed.model, headed.tokenizer, folder / name)
        predictions = predict(task.session, task.evaluator, headed)
        evaluations += task.evaluator.evaluations(name, task.data.split, predictions, WORST)
    task.session.wait()
    return models, outcome, evaluations


def _standalone(run: TaskPairRun) -> RunResult | None:
    """The same two models, each by itself, in a run that is gone on with and never repeated."""
    if not due_alone(run.recipe):
        return None
    folder, resolved = run.folder / STANDALONE, standalone(run.resolved)
    if claim_or_resume(run.task.session, folder, resolved):
        return RunResult.read(folder)
    Progress.log("the same models without each other")
    models, outcome, evaluations = _fit(run, resolved.recipe, folder)
    folders = {name: folder / name for name in ROLES}
    if run.task.session.is_main:
        cards = _cards(folders, models)
        _finished(run, resolved.recipe, folder, folders, outcome, cards, evaluations, Latency())
    run.task.session.wait()
    return RunResult.read(folder)


def _cards(folders: Mapping[str, Path], models: Mapping[str, TaskModel]) -> dict[str, dict[str, Any]]:
    return {name: describe(models[name].model, str(folder), folder) for name, folder in folders.items()}


def _finished(
    run: TaskPairRun,
    recipe: CotrainTaskRecipe,
    folder: Path,
    folders: Mapping[str, Path],
    outcome: Outcome,
    cards: Mapping[str, Mapping[str, Any]],
    evaluations: list[dict[str, Any]],
    latency: Latency,
    alone: RunResult | None = None,
) -> RunResult:
    return write_report(
        RunDir(folder),
        command="cotrain",
        recipe=recipe.model_dump(),
        cards=cards,
        folders=folders,
        latency=latency,
        outcome=outcome,
        quality=quality_of(evaluations),
        notes=run.task.notes,
        auto_class=AUTO_CLASS[run.task.data.task.kind].__name__,
        evaluations=evaluations,
        beside={STANDALONE: alone} if alone is not None else None,
    )


def probe_task_pair(run: TaskPairRun) -> Estimate:
    """Train for a few steps, together and without each other, for what that takes, and leave nothing behind."""
    runs = {run.folder: run.recipe}
    if due_alone(run.recipe):
        runs[run.folder / STANDALONE] = standalone(run.resolved).recipe
    cards: dict[str, dict[str, Any]] = {}
    found: list[StageEstimate] = []
    for folder, recipe in runs.items():
        models = _headed(run)
        cards = {name: describe(headed.model, str(run.folder / name), None) for name, headed in models.items()}
        job, schedule = on_task(run.task, recipe, models)
        assert isinstance(job.order, BucketOrder)
        found.append(estimate_stage(run.task.session, job, schedule, folder, job.order.steps_of_pass))
    return Estimate(cards, found)
