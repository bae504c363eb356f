"""`kdcli finetune`: an encoder and a labelled task -> a fine-tuned model, for every setting of a grid and every seed.

The setting with the best mean over its seeds wins; the result is the model of its best seed.
"""

import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data.labelled.lists import read_lists
from kdcli.disk import disk_errors
from kdcli.engine.launch import Session, choose_output_dir
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RECIPE, REPORT
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved, combinations
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import FINETUNED, RunRow, Selection
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import run_command
from kdcli.types import Outcome
from kdcli.workloads.predictions import summed_up
from kdcli.workloads.rerank import RerankRun, student_of
from kdcli.workloads.run import FinetuneStage, chosen_on, drop_weights, write_finetune_report
from kdcli.workloads.settings import FinetuneRecipe, RerankRecipe
from kdcli.workloads.task import PreparedTask, order_and_schedule, prepare


@dataclass(frozen=True)
class _Grid:
    """All runs of an invocation, checked; `settings` is what the grid sets in each stage."""

    resolved: Resolved[FinetuneRecipe]
    invocation: RunOptions
    folder: Path
    stages: list[FinetuneStage]
    settings: list[dict[str, Any]]
    task: PreparedTask

    def report(self) -> None:
        if len(self.stages) == 1 or not self.task.session.is_main:
            return
        task, recipe, stages = self.task, self.resolved.recipe, self.stages
        metric = task.data.task.metrics[0]
        reports = [RunResult.read(stage.folder).report for stage in stages]
        scores = [
            summed_up({e.set: e.metrics for e in r.evaluations}, recipe.choose_on) for r in reports
        ]
        alike = [
            range(first, first + recipe.seeds) for first in range(0, len(stages), recipe.seeds)
        ]
        best = max(alike, key=lambda numbers: statistics.fmean(scores[n][metric] for n in numbers))
        chosen = max(best, key=lambda n: scores[n][metric])
        seeds = [stage.resolved.recipe.train.seed for stage in stages]
        found = zip(self.settings, seeds, scores, strict=True)
        runs = [
            RunRow(settings=values, seed=seed, metrics=metrics) for values, seed, metrics in found
        ]
        # Model, tokenizer and log.jsonl.
        for file in stages[chosen].folder.iterdir():
            if file.is_file() and file.name not in (RECIPE, REPORT):
                with disk_errors(self.folder / file.name):
                    shutil.copy2(file, self.folder / file.name)
        report = reports[chosen]
        assert report.training is not None
        selection = Selection(
            metric=metric,
            on=chosen_on(task, recipe),
            settings=runs[chosen].settings,
            seed=runs[chosen].seed,
            runs=runs,
        )
        write_finetune_report(
            task,
            self.folder,
            recipe,
            replace(report.cards[FINETUNED], id=str(self.folder)),
            Outcome(**report.training.model_dump()),
            report.notes,
            report.evaluations,
            selection,
            timed=True,
        )
        for stage in stages:
            drop_weights(stage.folder)


def run(resolved: Resolved[FinetuneRecipe], invocation: RunOptions) -> RunResult | Estimate | None:
    """Fine-tune, evaluate and report. Returns the report (of several runs the chosen one's), or a dry run's estimate;
    None in a process that prints nothing. Raises KdcliError: see `kdcli.errors`; nothing was written if recipe, model
    or data cannot be used."""
    recipe = resolved.recipe
    if recipe.model is None:
        raise UsageError(
            "no model given",
            "kdcli finetune MODEL --task TASK; MODEL is a hub id, a directory or 'demo'",
        )
    if recipe.task is None:
        raise UsageError(
            "no task given", "add --task, for example --task sst2, or --task own for your own files"
        )
    check_grid([values for values, _ in combinations(resolved)])
    return run_command(resolved, invocation, _prepare)


def check_grid(settings: list[dict[str, Any]]) -> None:
    """Raise a `UsageError` for keys that all runs share, for lists as values, and for settings given twice."""
    for number, values in enumerate(settings):
        for key, value in values.items():
            if key == "train.seed":
                raise UsageError(
                    "grid.train.seed: seeds are no settings",
                    "--seeds N runs every setting with N seeds",
                )
            if (key != "keep" and not key.startswith("train.")) or key == "train.dtype":
                raise UsageError(
                    f"grid.{key}: the runs of a grid share model, data and number format",
                    "a grid holds keys of train, or keep; for others start one run each",
                )
            if not isinstance(value, float | int | str):
                raise UsageError(f"grid.{key} must hold values to try, got {value!r} among them")
        if values in settings[:number]:
            repeated = ", ".join(f"{key}={value}" for key, value in values.items())
            raise UsageError(
                f"the grid holds {repeated} twice",
                "give every value once; --seeds N repeats a setting",
            )


def _prepare(resolved: Resolved[FinetuneRecipe], invocation: RunOptions, session: Session) -> _Grid:
    recipe, first = resolved.recipe, resolved.recipe.train.seed
    folder = choose_output_dir(
        f"finetune-{Path(str(recipe.model)).name}-{recipe.task}", resolved, invocation, session
    )
    task, headed = prepare(recipe, session, generates=True)
    stages, settings = [], []
    schedules: dict[str, str] = {}
    for values, setting in combinations(resolved):
        _, schedule = order_and_schedule(task, setting.recipe)
        others = setting.recipe.train.model_dump(
            exclude={"epochs", "max_steps", "warmup_steps", "warmup_fraction"}
        )
        # What differs in epochs alone may still be as many steps.
        named = ", ".join(f"{key}={value}" for key, value in values.items())
        alike = schedules.setdefault(repr((schedule, setting.recipe.keep, others)), named)
        if alike != named:
            raise UsageError(
                f"the grid's {alike} and {named} train the same: {schedule.steps} steps, {schedule.warmup_steps} of "
                "warm-up",
                "leave one of them out",
            )
        # A dry run takes the first seed of a setting for all of them.
        for seed in range(first, first + (1 if invocation.dry_run else recipe.seeds)):
            train = setting.recipe.train.model_copy(update={"seed": seed})
            own = Resolved(setting.recipe.model_copy(update={"train": train}), setting.origins)
            parts = [f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]
            inside = folder / "runs" / ",".join([*parts, f"seed={seed}"]).replace("/", "_")
            stages.append(
                FinetuneStage(task, own, inside, repeats=recipe.seeds if invocation.dry_run else 1)
            )
            settings.append(values)
    if len(combinations(resolved)) * recipe.seeds == 1:
        stages = [FinetuneStage(task, stages[0].resolved, folder, headed, timed=True)]
    return _Grid(resolved, invocation, folder, stages, settings, task)


def run_rerank(
    resolved: Resolved[RerankRecipe], invocation: RunOptions
) -> RunResult | Estimate | None:
    """Fine-tune a reranker on lists of candidates; returns and raises as `run`."""
    recipe = resolved.recipe
    if recipe.student.source is None:
        raise UsageError("no model given", "kdcli finetune MODEL --task rerank --data DIR")
    if recipe.data.source is None:
        raise UsageError(
            "task rerank needs --data", "a file or directory of queries with their passages"
        )
    return run_command(resolved, invocation, _prepare_rerank)


def _prepare_rerank(
    resolved: Resolved[RerankRecipe], invocation: RunOptions, session: Session
) -> RerankRun:
    recipe, source = resolved.recipe, str(resolved.recipe.student.source)
    folder = choose_output_dir(
        f"finetune-{Path(source).name}-rerank", resolved, invocation, session
    )
    train, held_out, split = read_lists(
        str(recipe.data.source), seed=recipe.data.split_seed, log=Progress.log
    )
    scored = not np.isnan(train.scores).any()
    loss = recipe.ranking.loss
    if not scored and np.isnan(train.labels).all():
        raise UsageError(
            "the training passages have neither labels nor scores",
            "one of the two teaches the ranking",
        )
    if not scored and loss == "margin-mse":
        raise UsageError(
            "ranking.loss margin-mse learns a score of each passage, and some have none",
            "take listwise",
        )
    how = "scores in the data" if scored else "labels alone"
    make = student_of(recipe, source, session, train)
    return RerankRun(
        resolved,
        invocation,
        folder,
        session,
        "finetune",
        make,
        None,
        train,
        held_out,
        split,
        notes=[f"trained on {how}"],
    )
