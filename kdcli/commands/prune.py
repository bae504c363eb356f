"""`kdcli prune`: an encoder learns a task by what is removed from it; one run for each sparsity.

Data flow: examples → rows of tokens → logits of the masked model → hard loss, a teacher's soft loss, the method's own
terms → engine → masks → the masked, the compacted and the sparse form of the model, measured beside the dense one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from kdcli.bench.latency import Latency
from kdcli.downstream import Downstream, load_model, planned, prepare, quality_of
from kdcli.errors import UsageError
from kdcli.estimate import Estimate, probe_leg
from kdcli.finish import Finished, finish
from kdcli.launch import carry_out, place
from kdcli.models.card import describe
from kdcli.models.heads import Headed
from kdcli.prune_job import load_soft_teacher, prepared
from kdcli.prune_run import COMPACT, DENSE, MASKED, PruneRun, run_inside
from kdcli.pruners import check_settings, defaults
from kdcli.recipe import Resolved, defaulted
from kdcli.run_dir import RunDir
from kdcli.settings import Invocation, PruneRecipe


@dataclass(frozen=True)
class _Runs:
    """All runs of an invocation, checked and ready."""

    resolved: Resolved[PruneRecipe]
    invocation: Invocation
    folder: Path
    runs: list[PruneRun]
    task: Downstream
    teacher: Headed | None


def run(resolved: Resolved[PruneRecipe], invocation: Invocation) -> Finished | Estimate | None:
    """Prune once for each sparsity and report.

    Returns:
        The report, of several runs the one that compares them; the estimate of a dry run; None in a process that has
        nothing to print.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was claimed or written if recipe, models or data cannot be used.
    """
    recipe = resolved.recipe
    if recipe.model is None or recipe.task is None:
        raise UsageError("prune needs a model and a task", "kdcli prune MODEL --task TASK --sparsity 0.9")
    check_settings(recipe.method, recipe.pruner)
    resolved = _by_method(resolved)
    recipe = resolved.recipe
    twice = sorted({s for s in recipe.sparsity if recipe.sparsity.count(s) > 1})
    if twice:
        raise UsageError(f"sparsity {twice[0]:g} was asked for twice", "give each once")
    return carry_out(resolved, invocation, prepare=_prepared, probe=_dry_run, run=_train)


def _prepared(
    resolved: Resolved[PruneRecipe], invocation: Invocation, accelerator: Accelerator, device: torch.device
) -> _Runs:
    """Check models and data against each other and tokenise; claims nothing."""
    recipe = resolved.recipe
    folder = place(f"prune-{Path(str(recipe.model)).name}-{recipe.task}", resolved, invocation, accelerator)
    runs = _runs(resolved, folder)
    task, headed = prepare(recipe, accelerator, device, trust_remote_code=invocation.trust_remote_code)
    teacher = load_soft_teacher(task, recipe, headed)
    for of in runs:
        planned(task, of.resolved.recipe)
    return _Runs(resolved, invocation, folder, runs, task, teacher)


def _train(all_of: _Runs) -> Finished:
    """Prune once for each sparsity in a claimed directory."""
    task, recipe, folder = all_of.task, all_of.resolved.recipe, all_of.folder
    found = [run_inside(task, of, all_of.teacher, folder) for of in all_of.runs]
    if len(found) > 1 and task.accelerator.is_main_process:
        return _together(task, recipe, folder, all_of.runs, found)
    return found[0]


def _by_method(resolved: Resolved[PruneRecipe]) -> Resolved[PruneRecipe]:
    """What nobody said is as the method's authors had it: learning rate, the teacher's share, the head."""
    of_method, origin = defaults(resolved.recipe.method), f"method {resolved.recipe.method}"
    found = {"train.lr": of_method.lr, "kd.weight": of_method.teacher, "head.kind": of_method.head}
    return defaulted(resolved, found, origin)


def _runs(resolved: Resolved[PruneRecipe], folder: Path) -> list[PruneRun]:
    found = []
    for sparsity in resolved.recipe.sparsity:
        own = Resolved(resolved.recipe.model_copy(update={"sparsity": [sparsity]}), resolved.origins)
        name = f"{sparsity:g}"
        several = len(resolved.recipe.sparsity) > 1
        found.append(PruneRun(name, own, folder / f"sparsity-{name}" if several else folder))
    return found


def _together(
    task: Downstream, recipe: PruneRecipe, folder: Path, runs: list[PruneRun], found: list[Finished]
) -> Finished:
    """The report that compares the sparsities; each run has its own, with the latencies."""
    cards: dict[str, dict[str, Any]] = {}
    evaluations: list[dict[str, Any]] = []
    pruning: list[dict[str, Any]] = []
    for of, result in zip(runs, found, strict=True):
        report, name = result.report, f"{100 * of.resolved.recipe.sparsity[0]:g} %"
        # The form whose size says what was won; with zeros in it every model is as big as the dense one.
        form = COMPACT if COMPACT in report.models else MASKED
        cards.setdefault(DENSE, report.models[DENSE].model_dump())
        cards[name] = report.models[form].model_dump()
        evaluations += [e.model_dump() | {"model": name} for e in report.evaluations if e.model == form]
        pruning += [p.model_dump() | {"model": name} for p in report.pruning]
    return finish(
        RunDir(folder),
        command="prune",
        recipe=recipe.model_dump(),
        cards=cards,
        folders={},
        latency=Latency(),
        outcome=None,
        quality=quality_of(evaluations),
        notes=[*task.notes, *(f"sparsity {of.name}: {of.folder}" for of in runs)],
        evaluations=evaluations,
        pruning=pruning,
    )


def _dry_run(all_of: _Runs) -> Estimate:
    """Train every run for a few steps, for what they take, and leave nothing behind."""
    task, runs, teacher = all_of.task, all_of.runs, all_of.teacher
    card: dict[str, Any] = {}
    legs = []
    for of in runs:
        recipe = of.resolved.recipe
        headed = load_model(recipe, task.data.task, trust_remote_code=task.trust_remote_code)
        card = card or describe(headed.model, DENSE, None)
        ready = prepared(task, recipe, headed, teacher, folder=None, store=None)
        order, _ = planned(task, recipe)
        legs.append(probe_leg(task.accelerator, task.device, ready.job, ready.plan, of.folder, order.steps_of_pass))
    return Estimate({DENSE: card}, legs)
