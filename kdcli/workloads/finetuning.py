"""The fine-tuning stage: train one model on a workload's labels, save it and write its report.

`finetune` runs this stage for every setting of a grid. `distill` and `cotrain` run it inside their
own run directories to compare models on a task.
"""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from kdcli.data.tasks import task_of
from kdcli.deploy.latency import Subject
from kdcli.disk import as_directory, write_atomic
from kdcli.engine.launch import make_schedule
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session
from kdcli.messages import log
from kdcli.metrics.bootstrap import Scorer, WeightedScorer
from kdcli.models.card import describe
from kdcli.models.model import ROWS_FILE, Model, all_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Section
from kdcli.report.combine import mean_of_seeds
from kdcli.report.finish import Entry, RunResult
from kdcli.report.schema import FINETUNED, Evaluation, Selection, TrivialAnswer
from kdcli.report.sections.summary import change_text
from kdcli.report.text import data_name, number, short
from kdcli.run.context import RunContext
from kdcli.run.stages import Stage, StageJob, run_stage
from kdcli.types import OWN, Array, Outcome
from kdcli.workloads.finetune_recipes import downstream_recipe
from kdcli.workloads.labelled import WORST, LabelledWorkload
from kdcli.workloads.labelled_tasks import check_task_data, open_workload
from kdcli.workloads.predictions import Features, Prediction
from kdcli.workloads.requests import WorkloadRequest
from kdcli.workloads.scores import EvaluationResult, ModelScores, compare, paired_differences
from kdcli.workloads.settings import (
    DownstreamSettings,
    FinetuneRecipe,
    OnTask,
    SmallerSettings,
    TaskHeadSettings,
)
from kdcli.workloads.task_models import row_format
from kdcli.workloads.training import log_padding
from kdcli.workloads.workload import Workload

WEIGHTS = "model.safetensors"
PREDICTIONS = "predictions.json"
"""File with the predicted value of every held-out example."""
TUNED = "the fine-tuned model"
REMEDY = (
    "Train it longer (--epochs or --max-steps) or with a larger learning rate, such as --lr 1e-3 "
    "for a small model"
)
KEEP_SCORE = (
    "To keep the score, lower the learning rate (--lr) or train for fewer epochs (--epochs)"
)
BEFORE, AFTER = "start", "end"
"""Names of a model before and after its training, in the comparison with itself."""
DOWNSTREAM = "downstream"
"""Directory of the fine-tuning runs that compare models."""


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
        recipe: The recipe.
        model: The model whose tokenizer reads the rows.
        new_head: Add a new head to a model that has no fitting head.
        other_models: Other models that the run scores or learns from.
        generates: Whether the verb supports tasks that generate text.
    """
    metrics = recipe.metrics if isinstance(recipe, FinetuneRecipe) else ()
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
    )


def finetune_stage(
    context: RunContext[Section],
    workload: Workload,
    resolved: Resolved[FinetuneRecipe],
    folder: Path,
    *,
    model: Model | None = None,
    measured: bool = False,
    source: str | None = None,
) -> Stage:
    """Build the stage that fine-tunes one model in its own directory.

    Args:
        context: The run that the stage belongs to.
        workload: The data to train on.
        resolved: The recipe of the fine-tuning run.
        folder: The directory of the stage.
        model: The loaded model; None loads it when the stage is built.
        measured: Measure latency as the recipe specifies.
        source: The model, if the recipe names it relative to `folder`. In this case, the
            predictions are saved in `folder` to compare models later.
    """
    recipe = resolved.recipe

    def build() -> StageJob:
        if source is not None:
            log(f"run {folder.name}")
        name = source or str(recipe.model)
        before = None
        if source is None and recipe.student == SmallerSettings():
            before = scores_as_given(workload, name, recipe.head)
        loaded = model or workload.load(name, head=recipe.head, seed=recipe.train.seed)
        job, schedule = workload.job(loaded, recipe.train, recipe.keep)
        plan = workload.plan(recipe.train)
        log_padding(plan.order)

        def finish(outcome: Outcome) -> None:
            scores = scores_after_training(workload, loaded, outcome)
            notes: list[str] = []
            if source is None and context.is_main:
                scores = with_trivial_answer(workload, loaded, scores)
                notes = learning_notes(TUNED, scores.evaluations, RunDir(folder))
                if before is not None:
                    notes += notes_on_change(workload, "the model", before, scores, KEEP_SCORE)
            elif context.is_main:
                values = [prediction.value for prediction in scores.predictions]
                write_atomic(folder / PREDICTIONS, json.dumps(values))
            save_and_report(
                context,
                workload,
                recipe,
                folder,
                loaded,
                scores,
                outcome,
                measured=measured,
                notes=notes,
            )

        cards = {FINETUNED: describe(loaded.model, FINETUNED, None)}
        return StageJob(job, schedule, plan.steps_per_pass, finish, cards)

    return Stage(folder, resolved, build)


def scores_after_training(workload: Workload, model: Model, outcome: Outcome) -> ModelScores:
    """Score a model after training."""
    if outcome.best_step is not None:
        log(f"the best weights are from step {outcome.best_step}")
    return workload.score_trained(model, outcome.outputs, worst=WORST)


def scores_as_given(workload: Workload, source: str, head: TaskHeadSettings) -> ModelScores | None:
    """Score a model before its training; None if it has no head for the task."""
    if workload.misfit(source, head.label_map) is not None:
        return None
    return workload.score(workload.load(source, head=head, new_head=False))


def with_trivial_answer(workload: Workload, model: Model, scores: ModelScores) -> ModelScores:
    """Add the scores of the trivial answer to a model's evaluations, if the workload has one."""
    trivial = workload.trivial(model)
    if trivial is None:
        return scores
    rows = []
    for row, other in zip(scores.evaluations, trivial.evaluations, strict=True):
        own, base = scores.scorers[row.set], trivial.scorers[row.set]
        differences = paired_differences(
            own, base, scores.counts[row.set], examples=scores.examples.get(row.set)
        )
        _, low, _ = differences[workload.metric]
        shown = trivial.predictions[0].shown if trivial.predictions else ""
        answer = TrivialAnswer(answer=shown, metrics=other.metrics, is_beaten=low > 0)
        rows.append(row.model_copy(update={"trivial": answer}))
    return replace(scores, evaluations=rows)


def learning_notes(
    model: str, evaluations: Sequence[Evaluation], run: RunDir | None, remedy: str = REMEDY
) -> list[str]:
    """Return a note on each score with a trivial answer, and a warning if one is not beaten.

    Args:
        model: A description of the trained model.
        evaluations: Its scores.
        run: The directory of its training, whose log has the losses; None if these do not show
            what the model learned.
        remedy: What to do, as a sentence without its point.
    """
    notes = [
        describe_score(one, model, "held-out rows")
        for one in evaluations
        if one.trivial is not None
    ]
    if all(one.trivial is None or one.trivial.is_beaten for one in evaluations):
        # The loss alone may hardly fall because the model knew the task before.
        return notes
    log = run.read_log() if run is not None else []
    losses = [record["loss"] for record in log if record.get("loss") is not None]
    return [*notes, f"{model} {describe_learning(evaluations, losses)}. {remedy}"]


def baseline_notes(model: str, evaluations: Sequence[Evaluation]) -> list[str]:
    """Return notes on the trivial answer next to a model that was not trained here.

    They name the first score, each score that does not clearly beat the trivial answer, and what
    such a score means.
    """
    known = [one for one in evaluations if one.trivial is not None]
    unbeaten = [one for one in known if one.trivial is not None and not one.trivial.is_beaten]
    notes = [
        describe_score(one, model, "evaluated rows")
        for one in known
        if one in unbeaten or one is known[0]
    ]
    if unbeaten:
        notes.append(
            f"{model} is not clearly better than {_trivial_answer(unbeaten[0])}: it learned "
            "little, its labels have another order (head.label_map), or the rows are too few to "
            "tell. A student can match such a model and still be useless"
        )
    return notes


def notes_on_change(
    workload: Workload, model: str, before: ModelScores, after: ModelScores, remedy: str
) -> list[str]:
    """Compare a model's scores with its scores before the training, and add the remedy for a loss.

    Args:
        workload: The data that the model was scored on.
        model: A description of the model.
        before, after: Its scores.
        remedy: What to do if it has lost.
    """
    starts = {one.set: number(one.metrics[workload.metric]) for one in before.evaluations}
    result = compare(workload.name, {BEFORE: before, AFTER: after})
    notes, rows = list[str](), [r for r in result.comparisons if r.metric == workload.metric]
    for row in rows:
        where = f" on {row.set}" if row.set else ""
        start = f"{model} had {row.metric} {starts[row.set]}{where} before the training"
        notes.append(f"{start} and {change_text(row, row.metric)}")
    return [*notes, remedy] if any(row.high < 0 for row in rows) else notes


def kept_weights_note(workload: Workload, outcome: Outcome) -> list[str]:
    """Return a note on the step whose weights were kept, if the best step was chosen."""
    if outcome.best_step is None:
        return []
    return [
        f"the weights of step {outcome.best_step} were kept, chosen by {workload.metric} on "
        f"{workload.evaluated_on}; the scores are reported on the same rows"
    ]


def save_and_report(
    context: RunContext[Section],
    workload: Workload,
    recipe: FinetuneRecipe,
    folder: Path,
    model: Model,
    scores: ModelScores,
    outcome: Outcome,
    *,
    measured: bool,
    notes: Sequence[str] = (),
) -> None:
    """Save a fine-tuned model and write its report with `notes`, in the main process."""
    if not context.is_main:
        return
    workload.save(model, folder, all_rows(model.rows, workload.rows))
    source = str(recipe.model)
    made = f"fine-tuned from {short(source)} on {data_name(workload.name, recipe.data.source)}"
    saved = Entry.saved(FINETUNED, "finetuned", model.model, folder, made=made, source=source)
    notes = [*kept_weights_note(workload, outcome), *notes]
    contents = workload.report("finetune", recipe, [saved], outcome, notes=notes)
    contents.evaluations = scores.rows(FINETUNED)
    context.report(contents, recipe.measure if measured else None, folder)


def selected_report(
    context: RunContext[FinetuneRecipe],
    workload: Workload,
    chosen: RunResult,
    selection: Selection,
) -> None:
    """Write the report of a grid: the report of the chosen run, with the reason for the choice."""
    training = chosen.report.training
    assert training is not None
    folder = context.folder
    moved = replace(
        Entry.reported(chosen.report.model(FINETUNED)),
        card=replace(chosen.report.cards[FINETUNED], id=str(folder)),
        folder=folder,
        timed=Subject(FINETUNED, str(folder)),
    )
    outcome = Outcome(**training.model_dump())
    contents = workload.report("finetune", context.recipe, [moved], outcome)
    contents.notes = chosen.report.notes
    contents.selection = selection
    contents.evaluations = chosen.report.evaluations
    context.report(contents, context.recipe.measure)


def drop_weights(folder: Path) -> None:
    """Delete the weights of a model that was only trained to be scored."""
    for name in (WEIGHTS, ROWS_FILE):
        (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class DownstreamTask:
    """A task on which models are compared after the same fine-tuning."""

    workload: LabelledWorkload
    resolved: Resolved[FinetuneRecipe]


Downstream = dict[str, DownstreamTask]
"""Name of a task -> the task."""


def check_downstream(settings: DownstreamSettings, seed: int) -> None:
    """Check the tasks in the recipe's `eval` section without reading their data.

    Args:
        settings: The recipe's `eval` section.
        seed: The first training seed.

    Raises:
        UsageError: A task or an override is unknown.
    """
    for name in settings.tasks:
        downstream_recipe(settings, name, seed)
        if name != OWN:
            task_of(name)


def open_downstream(
    settings: DownstreamSettings, model: str, seed: int, context: RunContext[Section]
) -> Downstream:
    """Load and check the tasks in the recipe's `eval` section before any training.

    A dry run does not tokenise the data and returns no tasks.

    Args:
        settings: The recipe's `eval` section.
        model: Any of the models; all share its tokenizer and its hashes of training rows.
        seed: The first training seed.
        context: The run that compares the models.
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
        data, loaded, _ = check_task_data(request)
        # Without examples this only checks the tokenizer.
        form = row_format(recipe.data, data.task, loaded)
        Features.of(data.task, [], loaded.tokenizer, form)
        if data.task.kind != "span":
            # The number of windows of a span task is only known after tokenising.
            make_schedule(recipe.train, math.ceil(len(data.train) / recipe.train.batch_size))
    return tasks


def _with_model(resolved: Resolved[FinetuneRecipe], model: str) -> Resolved[FinetuneRecipe]:
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))


def compare_downstream(
    context: RunContext[Section],
    tasks: Downstream,
    sources: Mapping[str, str | Path],
    folder: Path,
    *,
    seeds: int = 1,
    baselines: Mapping[str, str] | None = None,
) -> EvaluationResult:
    """Fine-tune every model on every task with the same recipe and compare the results.

    Finished runs are read from disk. Their reports are kept and their weights are deleted.

    Args:
        context: The run that compares the models.
        tasks: The tasks.
        sources: Name in the report -> the model; a `Path` if this run made the model.
        folder: Directory of the fine-tuning runs.
        seeds: Number of runs per model and task.
        baselines: model -> the model it is compared with.

    Returns:
        Means over the seeds, and in the main process also the comparisons.
    """
    result = EvaluationResult()
    for task_name, task in tasks.items():
        scores: dict[str, ModelScores] = {}
        for name, source in sources.items():
            outer = folder / task_name / as_directory(name.replace(" ", "-"))
            folders = [outer / f"seed-{n}" if seeds > 1 else outer for n in range(seeds)]
            runs = [_finetune(context, task, source, run, n) for n, run in enumerate(folders)]
            scores[name] = _mean_scores(task.workload, runs, folders, context.session)
        # With `keep: best`, the step of every run is selected on the rows that are scored.
        chosen = list(scores) if task.resolved.recipe.keep == "best" else []
        of_task = compare(task_name, scores, baselines or {}, chosen=chosen)
        result.evaluations.extend(of_task.evaluations)
        if context.is_main:
            result.comparisons.extend(of_task.comparisons)
    return result


def _finetune(
    context: RunContext[Section], task: DownstreamTask, source: str | Path, folder: Path, seed: int
) -> list[Evaluation]:
    # A relative path to a model of this run stays valid if the run directory moves.
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
    """Average the scores of runs with different seeds. Mistakes of single runs are dropped."""
    evaluations = [mean_of_seeds(of_seeds) for of_seeds in zip(*runs, strict=True)]
    assert workload.evaluator is not None
    counts = {name: end - begin for name, (begin, end) in workload.evaluator.bounds.items()}
    scorers = _mean_scorers(workload, folders) if session.is_main else {}
    every = workload.evaluator.features.examples
    examples = {name: every[slice(*ends)] for name, ends in workload.evaluator.bounds.items()}
    counts = counts if session.is_main else {}
    return ModelScores(evaluations, scorers, counts, examples=examples)


def _mean_scorers(workload: LabelledWorkload, folders: Sequence[Path]) -> dict[str, Scorer]:
    """Build the scorers, set -> scorer, that average over the runs."""
    assert workload.evaluator is not None
    scorers_of_runs = []
    for folder in folders:
        values = json.loads((folder / PREDICTIONS).read_text("utf-8"))
        predictions = [Prediction(value, value, []) for value in values]
        scorers_of_runs.append(workload.evaluator.scorers(predictions))

    def mean(name: str) -> Scorer:
        def score(indices: Array) -> dict[str, float]:
            metrics = [scorers[name](indices) for scorers in scorers_of_runs]
            return {m: statistics.fmean(of_run[m] for of_run in metrics) for m in metrics[0]}

        first = scorers_of_runs[0][name]
        return replace(first, score=score) if isinstance(first, WeightedScorer) else score

    return {name: mean(name) for name in scorers_of_runs[0]}


HARDLY = 0.9
"""A training loss whose mean at the end is above this share of the mean at the start has hardly
fallen."""
ENDS = 0.05
"""The share of the logged losses that counts as the start, and as the end, of a training."""
MIN_LOSSES = 3
"""The minimum number of losses at each end, because the loss of a single batch is noisy."""


def describe_score(one: Evaluation, model: str, rows: str) -> str:
    """Write a score of a model, and the trivial answer's score if there is one.

    Args:
        one: The scores.
        model: A description of the model.
        rows: A description of the rows, such as `selection rows`.
    """
    metric, score = next(iter(one.metrics.items()))
    where = f"{one.n:,} {rows} of {one.set}".removesuffix(" of ")
    scored = f"{model} has {metric} {number(score)} on {where}"
    if one.trivial is None:
        return scored
    answer = one.trivial.answer
    always = f"answering {answer} to every text" if answer else "a random order of the passages"
    return f"{scored}; {always} has {number(one.trivial.metrics[metric])}"


def describe_learning(evaluations: Sequence[Evaluation], losses: Sequence[float]) -> str:
    """Describe the signs that a model learned little; empty if there are none.

    A model that has learned nothing has a score that is not clearly better than the trivial
    answer's. A training loss that hardly fell is a weaker sign, because labels that contradict each
    other limit how far it can fall.

    Args:
        evaluations: The scores of the model.
        losses: The logged losses of its training.
    """
    hardly = _hardly_fell(losses)
    known = [one for one in evaluations if one.trivial is not None]
    unbeaten = [one for one in known if one.trivial is not None and not one.trivial.is_beaten]
    if unbeaten:
        worse = f"its score is not clearly better than {_trivial_answer(unbeaten[0])}"
        return f"may have learned little or nothing: {' and '.join(filter(None, [worse, hardly]))}"
    return f"may not have learned all that it can: {hardly}" if hardly else ""


def _trivial_answer(one: Evaluation) -> str:
    """Describe the trivial answer of a score that has one."""
    has_answer = one.trivial is not None and one.trivial.answer
    return "always giving the same answer" if has_answer else "a random order"


def _hardly_fell(losses: Sequence[float]) -> str:
    """Describe a training loss that hardly fell; empty if it fell, or if it was logged once."""
    count = max(min(MIN_LOSSES, len(losses) // 2), round(ENDS * len(losses)))
    if count == 0:
        return ""
    first, last = fmean(losses[:count]), fmean(losses[-count:])
    if last < HARDLY * first:
        return ""
    how = "only went" if last < first else "rose"
    return f"its training loss {how} from {number(first)} to {number(last)} on average"
