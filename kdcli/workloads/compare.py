"""Downstream scores of models made on text: each is fine-tuned alike in its own run below the output directory."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kdcli.data.tasks import OWN, task_of
from kdcli.engine.launch import Session, make_schedule
from kdcli.engine.progress import Progress
from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.schema import Comparison, Evaluation
from kdcli.workloads.predictions import Features, compared
from kdcli.workloads.recipes import downstream_recipe
from kdcli.workloads.run import drop_weights, run_inside, scorers_of
from kdcli.workloads.settings import DownstreamSettings, FinetuneRecipe
from kdcli.workloads.task import (
    PreparedTask,
    check_task_data,
    features_of,
    order_and_schedule,
    prepare,
)

DOWNSTREAM = "downstream"  # directory of these fine-tunings
RESAMPLES = 1000
Tasks = dict[
    str, tuple[PreparedTask, Resolved[FinetuneRecipe]]
]  # name of a task -> its data, and how to fine-tune


@dataclass(frozen=True)
class DownstreamScores:
    """Mean scores over the seeds; `comparisons` are empty except in the main process."""

    evaluations: list[Evaluation] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)


def check_tasks(settings: DownstreamSettings, seed: int) -> None:
    """Raise a UsageError for tasks that cannot be opened, as far as that shows without their data."""
    for name in settings.tasks:
        downstream_recipe(settings, name, seed)
        if name != OWN:
            task_of(name)


def opened(
    settings: DownstreamSettings, model: str, seed: int, invocation: RunOptions, session: Session
) -> Tasks:
    """Load and check the tasks before anything is trained; a dry run does not tokenise and returns none. `model`: any
    model with the common tokenizer, whose training rows are those of all."""
    tasks = {}
    for name in settings.tasks:
        resolved = _with_model(downstream_recipe(settings, name, seed), model)
        if not invocation.dry_run:
            task, _ = prepare(resolved.recipe, session, generates=True)
            order_and_schedule(task, resolved.recipe)
            tasks[name] = task, resolved
            continue
        data, headed, _ = check_task_data(resolved.recipe, session, generates=True)
        # No examples: this checks the tokenizer alone.
        Features.of(
            data.task, [], headed.tokenizer, **features_of(resolved.recipe.data, data.task, headed)
        )
        if data.task.kind != "span":
            # The rows of a span task are windows, whose number is not known yet.
            train = resolved.recipe.train
            make_schedule(train, math.ceil(len(data.train) / train.batch_size))
    return tasks


def _with_model(resolved: Resolved[FinetuneRecipe], model: str) -> Resolved[FinetuneRecipe]:
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))


def scored(
    session: Session,
    tasks: Tasks,
    sources: Mapping[str, str | Path],
    folder: Path,
    *,
    seeds: int = 1,
    baselines: Mapping[str, str] | None = None,
) -> DownstreamScores:
    """Fine-tune every model on every task; runs that are done are read back. `sources`: name in the report -> where the
    model is, a `Path` for one that this run made. `folder`: of all these runs; their reports stay, their weights are
    deleted. `baselines`: name of a model -> of the one that it is compared with."""
    evaluations: list[Evaluation] = []
    comparisons: list[Comparison] = []
    for task_name, (task, resolved) in tasks.items():
        runs: dict[str, list[Path]] = {}
        for name, source in sources.items():
            own = folder / task_name / name.replace(" ", "-").replace(":", "_")
            runs[name] = [own / f"seed-{n}" if seeds > 1 else own for n in range(seeds)]
            found = [
                _fine_tuned(task, resolved, source, where, n) for n, where in enumerate(runs[name])
            ]
            evaluations += [_mean(each, name) for each in zip(*found, strict=True)]
        for name, baseline in (baselines or {}).items() if session.is_main else ():
            Progress.log(f"{RESAMPLES:,} resamples of {task_name}: {name} beside {baseline}")
            pair = [(each, _mean_scorers(task, runs[each])) for each in (name, baseline)]
            comparisons += compared(task.evaluator, pair[0], pair[1], RESAMPLES)
    return DownstreamScores(evaluations, comparisons)


def _fine_tuned(
    task: PreparedTask,
    resolved: Resolved[FinetuneRecipe],
    source: str | Path,
    where: Path,
    seed: int,
) -> list[Evaluation]:
    # The run may move to another machine; what it was given may not.
    named = Path(os.path.relpath(source, where)).as_posix() if isinstance(source, Path) else source
    recipe = resolved.recipe
    train = recipe.train.model_copy(update={"seed": recipe.train.seed + seed})
    seeded = replace(resolved, recipe=recipe.model_copy(update={"train": train}))
    result = run_inside(task, _with_model(seeded, named), where, str(source))
    if task.session.is_main:
        drop_weights(where)
    return result.report.evaluations


def _mean(runs: Sequence[Evaluation], model: str) -> Evaluation:
    """Average the evaluations of one set over runs that differ in their seed.

    Mistakes, classes and confusion are dropped, since they belong to one run.
    """
    first = runs[0].model_copy(update={"model": model})
    if len(runs) == 1:
        return first
    values = {metric: [run.metrics[metric] for run in runs] for metric in first.metrics}
    mean = {
        "metrics": {metric: statistics.fmean(v) for metric, v in values.items()},
        "deviations": {metric: statistics.stdev(v) for metric, v in values.items()},
        "seeds": len(runs),
    }
    return first.model_copy(update=mean | {"confusion": None, "per_class": {}, "worst": []})


def _mean_scorers(task: PreparedTask, runs: Sequence[Path]) -> dict[str, Scorer]:
    """Set -> the scorer that gives the mean over runs."""
    of_runs = [scorers_of(task, run) for run in runs]

    def mean(name: str) -> Scorer:
        def score(indices: Array) -> dict[str, float]:
            found = [scorers[name](indices) for scorers in of_runs]
            return {
                metric: statistics.fmean(values[metric] for values in found) for metric in found[0]
            }

        return score

    return {name: mean(name) for name in of_runs[0]}
