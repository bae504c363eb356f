"""`kdcli finetune`: an encoder and a labelled task → a model with a head, for every setting of a grid and every seed.

Of several runs the setting with the best mean over its seeds is chosen, and its best seed's model is the result.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdcli.disk import disk_errors
from kdcli.downstream.predictions import summed_up
from kdcli.downstream.run import WEIGHTS, chosen_on, finish_run, run_claimed, run_inside
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.downstream.task import PreparedTask, build_job, load_model, order_and_schedule, prepare
from kdcli.errors import UsageError
from kdcli.models.card import describe
from kdcli.models.heads import TaskModel
from kdcli.recipe.resolve import Resolved, combinations
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate, estimate_stage
from kdcli.report.finish import RunResult
from kdcli.report.views import FINETUNED
from kdcli.training.launch import already_done, choose_output_dir, run_command
from kdcli.training.run_dir import RECIPE, REPORT
from kdcli.training.session import Session
from kdcli.types import Outcome


@dataclass(frozen=True)
class _Run:
    """One run of the grid: what it sets, its seed, its own recipe and directory."""

    settings: dict[str, Any]
    seed: int
    resolved: Resolved[FinetuneRecipe]
    folder: Path


@dataclass(frozen=True)
class _Grid:
    """All runs of an invocation, checked and ready; `headed` is spent by the first training."""

    resolved: Resolved[FinetuneRecipe]
    invocation: Invocation
    folder: Path
    runs: list[_Run]
    task: PreparedTask
    headed: TaskModel


def run(resolved: Resolved[FinetuneRecipe], invocation: Invocation) -> RunResult | Estimate | None:
    """Fine-tune, evaluator and report.

    Returns:
        The report, of several runs that of the chosen one; the estimate of a dry run; None in a process that has
        nothing to print.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was claimed or written if recipe, model or data cannot be used.
    """
    recipe = resolved.recipe
    if recipe.model is None:
        raise UsageError("no model given", "kdcli finetune MODEL --task TASK; MODEL is a hub id, a directory or 'demo'")
    if recipe.task is None:
        raise UsageError("no task given", "add --task, for example --task sst2, or --task own for your own files")
    _check_grid([chosen for chosen, _ in combinations(resolved)])
    return run_command(resolved, invocation, prepare=_prepared, probe=_dry_run, run=_train)


def _prepared(resolved: Resolved[FinetuneRecipe], invocation: Invocation, session: Session) -> _Grid:
    """Check models and data against each other and tokenise; claims nothing."""
    recipe = resolved.recipe
    folder = choose_output_dir(f"finetune-{Path(str(recipe.model)).name}-{recipe.task}", resolved, invocation, session)
    runs = _runs(combinations(resolved), recipe, folder)
    task, headed = prepare(recipe, session, trust_remote_code=invocation.trust_remote_code)
    for of in runs:
        order_and_schedule(task, of.resolved.recipe)
    return _Grid(resolved, invocation, folder, runs, task, headed)


def _train(grid: _Grid) -> RunResult | None:
    """Train every run that is not done in a claimed directory, and report the chosen one."""
    task, recipe, folder = grid.task, grid.resolved.recipe, grid.folder
    if already_done(folder):
        return RunResult.read(folder)
    if len(grid.runs) == 1:
        return run_claimed(task, recipe, folder, headed=grid.headed, timed=True)
    found = [run_inside(task, of.resolved, of.folder) for of in grid.runs]
    return _choose(task, recipe, folder, grid.runs, found) if task.session.is_main else None


def _check_grid(settings: list[dict[str, Any]]) -> None:
    """What differs between runs must be read anew for each, and stand in the report once."""
    for number, chosen in enumerate(settings):
        for key, value in chosen.items():
            if key == "train.seed":
                raise UsageError("grid.train.seed: seeds are no settings", "--seeds N runs every setting with N seeds")
            if (key != "keep" and not key.startswith("train.")) or key == "train.dtype":
                raise UsageError(
                    f"grid.{key}: the runs of a grid share model, data and number format",
                    "a grid holds keys of train, or keep; for others start one run each",
                )
            if not isinstance(value, float | int | str):
                raise UsageError(f"grid.{key} must hold values to try, got {value!r} among them")
        if chosen in settings[:number]:
            said = ", ".join(f"{key}={value}" for key, value in chosen.items())
            raise UsageError(f"the grid holds {said} twice", "give every value once; --seeds N repeats a setting")


def _runs(
    settings: list[tuple[dict[str, Any], Resolved[FinetuneRecipe]]], recipe: FinetuneRecipe, folder: Path
) -> list[_Run]:
    first = recipe.train.seed
    if len(settings) == 1 and recipe.seeds == 1:
        return [_Run({}, first, settings[0][1], folder)]
    runs = []
    for chosen, resolved in settings:
        for seed in range(first, first + recipe.seeds):
            train = resolved.recipe.train.model_copy(update={"seed": seed})
            own = Resolved(resolved.recipe.model_copy(update={"train": train}), resolved.origins)
            parts = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
            name = ",".join([*parts, f"seed={seed}"]).replace("/", "_")
            runs.append(_Run(chosen, seed, own, folder / "runs" / name))
    return runs


def _choose(
    task: PreparedTask, recipe: FinetuneRecipe, folder: Path, runs: list[_Run], found: list[RunResult]
) -> RunResult:
    """The setting with the best mean over its seeds, and its best run, whose model becomes that of the directory."""
    metric = task.data.task.metrics[0]
    scores = [summed_up({e.set: e.metrics for e in f.report.evaluations}, recipe.choose_on) for f in found]
    by_setting: dict[str, list[int]] = {}
    for number, of in enumerate(runs):
        by_setting.setdefault(repr(of.settings), []).append(number)
    best = max(by_setting.values(), key=lambda numbers: statistics.fmean(scores[n][metric] for n in numbers))
    chosen = max(best, key=lambda n: scores[n][metric])
    # Model, tokenizer and log.jsonl of the chosen run.
    for file in runs[chosen].folder.iterdir():
        if file.is_file() and file.name not in (RECIPE, REPORT):
            with disk_errors(folder / file.name):
                shutil.copy2(file, folder / file.name)
    report = found[chosen].report
    assert report.training is not None
    result = finish_run(
        task,
        folder,
        recipe,
        card=report.models[FINETUNED].model_dump() | {"id": str(folder)},
        timed=True,
        outcome=Outcome(**report.training.model_dump()),
        notes=report.notes,
        evaluations=[e.model_dump() for e in report.evaluations],
        selection={
            "metric": metric,
            "on": chosen_on(task, recipe),
            "settings": runs[chosen].settings,
            "seed": runs[chosen].seed,
            "runs": [{"settings": r.settings, "seed": r.seed, "metrics": s} for r, s in zip(runs, scores, strict=True)],
        },
    )
    for of in runs:
        # Their reports, logs and recipes stay; a model that was not chosen can be made again.
        (of.folder / WEIGHTS).unlink(missing_ok=True)
    return result


def _dry_run(grid: _Grid) -> Estimate:
    """Train the first run of every setting for a few steps, for what they take, and leave nothing behind."""
    task, runs = grid.task, grid.runs
    card: dict[str, Any] = {}
    stages = []
    for of in {repr(r.settings): r for r in reversed(runs)}.values():
        recipe = of.resolved.recipe
        headed = load_model(recipe, task.data.task, trust_remote_code=task.session.trust_remote_code)
        job, schedule = build_job(task, recipe, headed)
        card = describe(headed.model, FINETUNED, None)
        order, _ = order_and_schedule(task, recipe)
        leg = estimate_stage(task.session, job, schedule, of.folder, order.steps_of_pass)
        seeds = sum(r.settings == of.settings for r in runs)
        name = leg.folder if seeds == 1 else f"{leg.folder} and {seeds - 1} more seeds"
        stages.append(replace(leg, folder=name, seconds=seeds * leg.seconds))
    return Estimate({FINETUNED: card}, stages[::-1])
