"""`kdcli prune`: an encoder learns a task by what is removed from it; one run for each method and sparsity.

Data flow: examples → rows of tokens → logits of the masked model → hard loss, a teacher's soft loss, the method's own
terms → engine → masks → the masked, the compacted and the sparse form of the model, measured beside the dense one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kdcli.bench.latency import Latency
from kdcli.commands.prune.job import load_soft_teacher, prepared
from kdcli.commands.prune.one_run import COMPACT, DENSE, MASKED, PruneRun, run_inside
from kdcli.commands.prune.settings import PruneRecipe
from kdcli.downstream.task import PreparedTask, load_model, order_and_schedule, prepare, quality_of
from kdcli.errors import UsageError
from kdcli.models.card import describe
from kdcli.models.heads import TaskModel
from kdcli.pruners import check_settings, defaults
from kdcli.recipe.resolve import Resolved, defaulted
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate, estimate_stage
from kdcli.report.finish import RunResult, write_report
from kdcli.training.launch import choose_output_dir, run_command
from kdcli.training.run_dir import RunDir
from kdcli.training.session import Session


@dataclass(frozen=True)
class _Runs:
    """All runs of an invocation, checked and ready."""

    resolved: Resolved[PruneRecipe]
    invocation: Invocation
    folder: Path
    runs: list[PruneRun]
    task: PreparedTask
    teacher: TaskModel | None


def run(asked: Sequence[Resolved[PruneRecipe]], invocation: Invocation) -> RunResult | Estimate | None:
    """Prune once for each method and sparsity and report.

    Args:
        asked: a recipe for each method, alike but for what belongs to the method.

    Returns:
        The report, of several runs the one that compares them; the estimate of a dry run; None in a process that has
        nothing to print.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was claimed or written if recipe, models or data cannot be used.
    """
    recipe, methods = asked[0].recipe, [of.recipe.method for of in asked]
    if recipe.model is None or recipe.task is None:
        raise UsageError("prune needs a model and a task", "kdcli prune MODEL --task TASK --sparsity 0.9")
    for of in asked:
        check_settings(of.recipe.method, of.recipe.pruner)
    for what, given in (("method", methods), ("sparsity", [f"{s:g}" for s in recipe.sparsity])):
        if twice := [one for one in given if given.count(one) > 1]:
            raise UsageError(f"{what} {twice[0]} was asked for twice", "give each once")
    complete = [_by_method(of) for of in asked]
    return run_command(complete[0], invocation, prepare=partial(_prepared, complete), probe=_dry_run, run=_train)


def _prepared(
    asked: Sequence[Resolved[PruneRecipe]],
    first: Resolved[PruneRecipe],
    invocation: Invocation,
    session: Session,
) -> _Runs:
    """Check models and data against each other and tokenise; claims nothing."""
    recipe = first.recipe
    folder = choose_output_dir(f"prune-{Path(str(recipe.model)).name}-{recipe.task}", first, invocation, session)
    runs = _runs(asked, folder)
    task, headed = prepare(recipe, session)
    teacher = load_soft_teacher(task, recipe, headed)
    # What a later run would stumble over is found before the first begins: each method has a head of its own.
    for of in asked[1:]:
        load_model(of.recipe, task.data.task, trust_remote_code=invocation.trust_remote_code)
    for run in runs:
        order_and_schedule(task, run.resolved.recipe)
    return _Runs(first, invocation, folder, runs, task, teacher)


def _train(all_of: _Runs) -> RunResult:
    """Prune once for each method and sparsity in a claimed directory."""
    task, recipe, folder = all_of.task, all_of.resolved.recipe, all_of.folder
    found = [run_inside(task, of, all_of.teacher, folder) for of in all_of.runs]
    if len(found) > 1 and task.session.is_main:
        return _together(task, recipe, folder, all_of.runs, found)
    return found[0]


def _by_method(resolved: Resolved[PruneRecipe]) -> Resolved[PruneRecipe]:
    """What nobody said is as the method's authors had it: learning rate, the teacher's share, the head."""
    of_method, origin = defaults(resolved.recipe.method), f"method {resolved.recipe.method}"
    found = {"train.lr": of_method.lr, "kd.weight": of_method.teacher, "head.kind": of_method.head}
    return defaulted(resolved, found, origin)


def _runs(asked: Sequence[Resolved[PruneRecipe]], folder: Path) -> list[PruneRun]:
    """One run for each method and sparsity, in `METHOD/`, `sparsity-S/` or `METHOD/sparsity-S/` where there are several
    of the one, of the other or of both; a method that no density can be asked of has one run."""
    found = []
    for resolved in asked:
        recipe = resolved.recipe
        exact = defaults(recipe.method).exact and recipe.pruner.get("masking") != "threshold"
        several = exact and len(recipe.sparsity) > 1
        for sparsity in recipe.sparsity if exact else recipe.sparsity[:1]:
            own = Resolved(recipe.model_copy(update={"sparsity": [sparsity]}), resolved.origins)
            inside = [recipe.method] * (len(asked) > 1) + [f"sparsity-{sparsity:g}"] * several
            shown = [recipe.method] * (len(asked) > 1) + [f"{100 * sparsity:g} %"] * (several or len(asked) == 1)
            found.append(PruneRun(" ".join(shown), own, folder.joinpath(*inside)))
    return found


def _together(
    task: PreparedTask, recipe: PruneRecipe, folder: Path, runs: list[PruneRun], found: list[RunResult]
) -> RunResult:
    """The report that compares the runs; each has its own, with the latencies."""
    cards: dict[str, dict[str, Any]] = {}
    evaluations: list[dict[str, Any]] = []
    pruning: list[dict[str, Any]] = []
    for of, result in zip(runs, found, strict=True):
        report, name = result.report, of.name
        # The form whose size says what was won; with zeros in it every model is as big as the dense one.
        form = COMPACT if COMPACT in report.models else MASKED
        cards.setdefault(DENSE, report.models[DENSE].model_dump())
        cards[name] = report.models[form].model_dump()
        evaluations += [e.model_dump() | {"model": name} for e in report.evaluations if e.model == form]
        pruning += [p.model_dump() | {"model": name} for p in report.pruning]
    return write_report(
        RunDir(folder),
        command="prune",
        recipe=recipe.model_dump(),
        cards=cards,
        folders={},
        latency=Latency(),
        outcome=None,
        quality=quality_of(evaluations),
        notes=[*task.notes, *(f"{of.name}: {of.folder}" for of in runs), *_whose_recipe(runs)],
        evaluations=evaluations,
        pruning=pruning,
    )


def _whose_recipe(runs: list[PruneRun]) -> list[str]:
    """Which run's recipe a report of several methods holds."""
    first, *others = dict.fromkeys(of.resolved.recipe.method for of in runs)
    return [f"recipe.yaml here is that of {first}; each run has its own"] if others else []


def _dry_run(all_of: _Runs) -> Estimate:
    """Train every run for a few steps, for what they take, and leave nothing behind."""
    task, runs, teacher = all_of.task, all_of.runs, all_of.teacher
    card: dict[str, Any] = {}
    stages = []
    for of in runs:
        recipe = of.resolved.recipe
        headed = load_model(recipe, task.data.task, trust_remote_code=task.session.trust_remote_code)
        card = card or describe(headed.model, DENSE, None)
        ready = prepared(task, recipe, headed, teacher, folder=None, store=None)
        order, _ = order_and_schedule(task, recipe)
        stages.append(estimate_stage(task.session, ready.job, ready.schedule, of.folder, order.steps_of_pass))
    return Estimate({DENSE: card}, stages)
