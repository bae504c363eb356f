"""Fine-tuning: a stage that trains one model against the labels of a workload, saves and reports.

`finetune` runs it for every setting of a grid; `distill` and `cotrain` run it inside their own
directories to compare models on a task.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdcli.data.tasks import OWN, task_of
from kdcli.deploy.latency import Subject
from kdcli.disk import write_atomic
from kdcli.engine.launch import Session, make_schedule
from kdcli.engine.progress import Progress
from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.models.card import describe
from kdcli.models.model import Model
from kdcli.models.training_rows import FILE, all_rows
from kdcli.recipe.resolve import Resolved
from kdcli.report.finish import ReportContents, ReportedModel, RunResult
from kdcli.report.schema import FINETUNED, Evaluation, Selection
from kdcli.run.context import RunContext
from kdcli.run.stages import Stage, StageJob, run_stage
from kdcli.types import Card, Outcome
from kdcli.workloads.labelled import (
    WORST,
    LabelledWorkload,
    row_format,
)
from kdcli.workloads.predictions import Features, Prediction
from kdcli.workloads.recipes import downstream_recipe
from kdcli.workloads.settings import DownstreamSettings, FinetuneRecipe, GenerationSettings, OnTask
from kdcli.workloads.tasks import check_task_data, open_workload
from kdcli.workloads.workload import (
    EvaluationResult,
    ModelScores,
    Workload,
    WorkloadRequest,
    compare,
    log_padding,
)

WEIGHTS = "model.safetensors"
PREDICTIONS = "predictions.json"
"""The predicted value of every held-out example."""
DOWNSTREAM = "downstream"
"""Directory of fine-tunings that compare models."""


def request_of(
    recipe: OnTask,
    model: str,
    *,
    new_head: bool = True,
    other_models: Sequence[str] = (),
    generates: bool = False,
) -> WorkloadRequest:
    """Build the request for a recipe's workload.

    Args:
        model: the model whose tokenizer reads the rows.
        new_head, other_models, generates: see `WorkloadRequest`.
    """
    metrics: Sequence[str] = ()
    generation = GenerationSettings()
    if isinstance(recipe, FinetuneRecipe):
        metrics, generation = recipe.metrics, recipe.generation
    return WorkloadRequest(
        str(recipe.task),
        model,
        recipe.data,
        recipe.head,
        recipe.workload,
        metrics,
        recipe.choose_on,
        recipe.train.seed,
        new_head,
        other_models,
        generates,
        generation,
    )


def finetune_stage(
    context: RunContext[Any],
    workload: Workload,
    resolved: Resolved[FinetuneRecipe],
    folder: Path,
    *,
    model: Model | None = None,
    measured: bool = False,
    repeats: int = 1,
    source: str | None = None,
) -> Stage:
    """Fine-tune one model in a directory of its own.

    Args:
        model: the loaded model; None loads it when the stage is built.
        measured: measure latency as the recipe says.
        repeats: see `StageJob`.
        source: where the model is, if the recipe names it relative to `folder`. The predictions
            then stay in the directory, to compare models by.
    """
    recipe = resolved.recipe

    def build() -> StageJob:
        if not measured:
            Progress.log(f"run {folder.name}")
        name = source or str(recipe.model)
        loaded = model or workload.load(name, head=recipe.head, seed=recipe.train.seed)
        job, schedule = workload.job(loaded, recipe.train, recipe.keep)
        plan = workload.plan(recipe.train)
        log_padding(plan.order)

        def finish(outcome: Outcome) -> None:
            scores = scores_after_training(workload, loaded, outcome)
            if source is not None and context.is_main:
                values = [prediction.value for prediction in scores.predictions]
                write_atomic(folder / PREDICTIONS, json.dumps(values))
            save_and_report(
                context, workload, recipe, folder, loaded, scores, outcome, measured=measured
            )

        cards = {FINETUNED: describe(loaded.model, FINETUNED, None)}
        return StageJob(job, schedule, plan.steps_per_pass, finish, cards, repeats)

    return Stage(folder, resolved, build)


def scores_after_training(workload: Workload, model: Model, outcome: Outcome) -> ModelScores:
    """Score a model after its training."""
    if outcome.best_step is not None:
        Progress.log(f"the best weights are those of step {outcome.best_step}")
    return workload.score(model, worst=WORST)


def kept_weights_note(workload: Workload, outcome: Outcome) -> list[str]:
    """A note on the step whose weights were kept."""
    if outcome.best_step is None:
        return []
    on = workload.evaluated_on
    return [
        f"the weights of step {outcome.best_step} were kept, chosen by {workload.metric} on {on}, "
        "on which the scores are also reported"
    ]


def save_and_report(
    context: RunContext[Any],
    workload: Workload,
    recipe: FinetuneRecipe,
    folder: Path,
    model: Model,
    scores: ModelScores,
    outcome: Outcome,
    *,
    measured: bool,
) -> None:
    """Save and report a fine-tuned model, in the main process."""
    if not context.is_main:
        return
    workload.save(model, folder, all_rows(model.rows, workload.rows))
    contents = finetune_contents(
        workload, recipe, folder, describe(model.model, str(folder), folder)
    )
    contents.outcome = outcome
    contents.notes = [*workload.notes, *kept_weights_note(workload, outcome)]
    contents.evaluations = scores.rows(FINETUNED)
    context.report(contents, recipe.measure if measured else None, folder)


def finetune_contents(
    workload: Workload, recipe: FinetuneRecipe, folder: Path, card: Card
) -> ReportContents:
    """The report of a fine-tuned model, without scores and latency."""
    timed = Subject(FINETUNED, str(folder))
    model = ReportedModel(FINETUNED, "finetuned", card, folder=folder, timed=timed)
    return ReportContents(
        "finetune",
        recipe,
        [model],
        auto_class=workload.auto_class,
        pipeline=workload.pipeline,
    )


def selected_report(
    context: RunContext[FinetuneRecipe],
    workload: Workload,
    chosen: RunResult,
    selection: Selection,
) -> None:
    """Report the run that was chosen from a grid as the run of the whole directory."""
    training = chosen.report.training
    assert training is not None
    card = chosen.report.cards[FINETUNED]
    contents = finetune_contents(
        workload, context.recipe, context.folder, replace(card, id=str(context.folder))
    )
    contents.outcome = Outcome(**training.model_dump())
    contents.notes = chosen.report.notes
    contents.selection = selection
    contents.evaluations = chosen.report.evaluations
    context.report(contents, context.recipe.measure)


def drop_weights(folder: Path) -> None:
    """Delete a model of which only the scores are wanted."""
    for name in (WEIGHTS, FILE):
        (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class DownstreamTask:
    """A task that models are compared on after the same fine-tuning."""

    workload: LabelledWorkload
    resolved: Resolved[FinetuneRecipe]


Downstream = dict[str, DownstreamTask]
"""Name of a task -> the task."""


def check_downstream(settings: DownstreamSettings, seed: int) -> None:
    """Check the tasks of the recipe's `eval` section, as far as possible without their data.

    Raises:
        UsageError: an unknown task or override.
    """
    for name in settings.tasks:
        downstream_recipe(settings, name, seed)
        if name != OWN:
            task_of(name)


def open_downstream(
    settings: DownstreamSettings, model: str, seed: int, context: RunContext[Any]
) -> Downstream:
    """Load and check the tasks before anything is trained.

    A dry run does not tokenise and returns no task.

    Args:
        model: any model with the common tokenizer, whose training rows are those of all models.
    """
    tasks: Downstream = {}
    for name in settings.tasks:
        resolved = _with_model(downstream_recipe(settings, name, seed), model)
        recipe = resolved.recipe
        request = request_of(recipe, model, generates=True)
        if not context.dry_run:
            workload, _ = open_workload(request, context.session)
            workload.plan(recipe.train)
            tasks[name] = DownstreamTask(workload, resolved)
            continue
        data, loaded, _ = check_task_data(request, context.session)
        # Without examples this only checks the tokenizer.
        shape = row_format(recipe.data, data.task, loaded)
        Features.of(data.task, [], loaded.tokenizer, **shape)
        if data.task.kind != "span":
            # The rows of a span task are windows, whose number is not known yet.
            make_schedule(recipe.train, math.ceil(len(data.train) / recipe.train.batch_size))
    return tasks


def _with_model(resolved: Resolved[FinetuneRecipe], model: str) -> Resolved[FinetuneRecipe]:
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))


def compare_downstream(
    context: RunContext[Any],
    tasks: Downstream,
    sources: Mapping[str, str | Path],
    folder: Path,
    *,
    seeds: int = 1,
    baselines: Mapping[str, str] | None = None,
) -> EvaluationResult:
    """Fine-tune every model on every task with the same recipe and compare the results.

    Runs that are done are read back. Their reports stay, their weights are deleted.

    Args:
        sources: name in the report -> where the model is; a `Path` for one that this run made.
        folder: directory of all these runs.
        seeds: number of fine-tunings of each model on each task.
        baselines: model -> the model that it is compared with.

    Returns:
        Means over the seeds; comparisons in the main process only.
    """
    result = EvaluationResult()
    for task_name, task in tasks.items():
        scores: dict[str, ModelScores] = {}
        for name, source in sources.items():
            own = folder / task_name / name.replace(" ", "-").replace(":", "_")
            places = [own / f"seed-{n}" if seeds > 1 else own for n in range(seeds)]
            runs = [_fine_tuned(context, task, source, place, n) for n, place in enumerate(places)]
            scores[name] = _mean_scores(task.workload, runs, places, context.session)
        # Each fine-tuning may keep the best of its evaluations on these rows.
        chosen = list(scores) if task.resolved.recipe.keep == "best" else []
        found = compare(task_name, scores, baselines or {}, chosen=chosen)
        result.evaluations.extend(found.evaluations)
        if context.is_main:
            result.comparisons.extend(found.comparisons)
    return result


def _fine_tuned(
    context: RunContext[Any], task: DownstreamTask, source: str | Path, folder: Path, seed: int
) -> list[Evaluation]:
    # The run may move to another machine; what the user gave may not.
    name = str(source)
    if isinstance(source, Path):
        name = Path(os.path.relpath(source, folder)).as_posix()
    recipe = task.resolved.recipe
    train = recipe.train.model_copy(update={"seed": recipe.train.seed + seed})
    seeded = replace(task.resolved, recipe=recipe.model_copy(update={"train": train}))
    resolved = _with_model(seeded, name)
    stage = finetune_stage(context, task.workload, resolved, folder, source=str(source))
    run_stage(context, stage)
    if context.is_main:
        drop_weights(folder)
    return RunResult.read(folder).report.evaluations


def _mean_scores(
    workload: LabelledWorkload,
    runs: Sequence[list[Evaluation]],
    folders: Sequence[Path],
    session: Session,
) -> ModelScores:
    """The mean over runs that differ in their seed, without the mistakes of any one run."""
    evaluations = [_mean(each) for each in zip(*runs, strict=True)]
    assert workload.evaluator is not None
    counts = {name: end - begin for name, (begin, end) in workload.evaluator.bounds.items()}
    scorers = _mean_scorers(workload, folders) if session.is_main else {}
    return ModelScores(evaluations, scorers, counts if session.is_main else {})


def _mean(runs: Sequence[Evaluation]) -> Evaluation:
    first = runs[0]
    if len(runs) == 1:
        return first
    values = {metric: [run.metrics[metric] for run in runs] for metric in first.metrics}
    return first.model_copy(
        update={
            "confusion": None,
            "per_class": {},
            "worst": [],
            "metrics": {metric: statistics.fmean(v) for metric, v in values.items()},
            "deviations": {metric: statistics.stdev(v) for metric, v in values.items()},
            "seeds": len(runs),
        }
    )


def _mean_scorers(workload: LabelledWorkload, folders: Sequence[Path]) -> dict[str, Scorer]:
    """Set -> the scorer that gives the mean over runs."""
    assert workload.evaluator is not None
    of_runs = []
    for folder in folders:
        values = json.loads((folder / PREDICTIONS).read_text("utf-8"))
        predictions = [Prediction(value, value, []) for value in values]
        of_runs.append(workload.evaluator.scorers(predictions))

    def mean(name: str) -> Scorer:
        def score(indices: Array) -> dict[str, float]:
            metrics = [scorers[name](indices) for scorers in of_runs]
            return {m: statistics.fmean(each[m] for each in metrics) for m in metrics[0]}

        return score

    return {name: mean(name) for name in of_runs[0]}
