"""`kdcli finetune`: an encoder and a labelled task → a model with a head, for every setting of a grid and every seed.

Data flow of a run: examples → rows of tokens → batches of similar length → logits → loss → engine → model directory;
then, of several runs, the setting with the best mean over seeds, and its best seed.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from kdcli.data.batches import BatchPlan, BucketPlan
from kdcli.data.labelled import Labelled, check_training, open_labelled
from kdcli.data.spans import misplaced
from kdcli.engine import track, train
from kdcli.errors import UsageError
from kdcli.estimate import PROBE_STEPS, Estimate, estimate_leg
from kdcli.finish import Finished, finish
from kdcli.held_out import evaluate
from kdcli.judge import Features, Judge, summed_up
from kdcli.launch import launch, plan_of
from kdcli.losses.hard import hard_loss, labelled
from kdcli.models.capture import capture, unreached
from kdcli.models.card import describe
from kdcli.models.heads import AUTO_CLASS, Headed, load_for_task
from kdcli.models.load import save_model
from kdcli.models.shape import positions_of
from kdcli.progress import Progress
from kdcli.recipe import FinetuneRecipe, Invocation, Resolved, combinations
from kdcli.report.schema import Report
from kdcli.run_dir import RunDir, numbered
from kdcli.types import Batch, Job, Needs, Outcome, Plan, StepLoss

NAME = "finetuned"
"""Name of the model in its report."""

MISPLACED_ALLOWED = 0.01
"""Share of answers that may not be in their context; more is a mistake in the data and not of an annotator."""

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class _Run:
    """One run of the grid: what it sets, its seed, its own recipe and directory."""

    settings: dict[str, Any]
    seed: int
    resolved: Resolved[FinetuneRecipe]
    folder: Path


@dataclass(frozen=True)
class _Context:
    """What all runs of one invocation share."""

    accelerator: Accelerator
    device: torch.device
    invocation: Invocation
    data: Labelled
    train: Features
    judge: Judge
    notes: list[str]


def run(resolved: Resolved[FinetuneRecipe], invocation: Invocation) -> Finished | Estimate | None:
    """Fine-tune, judge and report.

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
    settings = combinations(resolved)
    launched = launch(recipe.train.dtype, invocation)
    if launched is None:
        return None
    accelerator, device = launched
    name = f"finetune-{Path(recipe.model).name}-{recipe.task}"
    folder = invocation.output_dir or numbered(name, taken=invocation.resume or invocation.overwrite)
    folder = Path(broadcast_object_list([folder])[0])
    runs = _runs(settings, recipe, folder)
    if not invocation.dry_run and accelerator.is_main_process:
        RunDir(folder).check(resolved.to_yaml(), resume=invocation.resume, overwrite=invocation.overwrite)
    context = _prepared(recipe, invocation, accelerator, device)
    if invocation.dry_run:
        return _dry_run(context, runs)
    if accelerator.is_main_process:
        RunDir.claim(folder, resolved.to_yaml(), resume=invocation.resume, overwrite=invocation.overwrite)
    accelerator.wait_for_everyone()
    track(accelerator, folder)
    result: Finished | None
    if len(runs) == 1:
        result = _one(context, runs[0], alone=True)
    else:
        reports = [_one(context, of, alone=False) for of in runs]
        result = _choose(context, resolved, folder, runs, reports) if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return result if accelerator.is_main_process else None


def _runs(
    settings: list[tuple[dict[str, Any], Resolved[FinetuneRecipe]]], recipe: FinetuneRecipe, folder: Path
) -> list[_Run]:
    if len(settings) == 1 and recipe.seeds == 1:
        return [_Run({}, settings[0][1].recipe.train.seed, settings[0][1], folder)]
    runs = []
    for chosen, resolved in settings:
        for seed in range(resolved.recipe.train.seed, resolved.recipe.train.seed + recipe.seeds):
            own = resolved.recipe.model_copy(
                update={"train": resolved.recipe.train.model_copy(update={"seed": seed})}, deep=True
            )
            parts = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
            name = ",".join([*parts, f"seed={seed}"]).replace("/", "_")
            runs.append(_Run(chosen, seed, Resolved(own, resolved.origins), folder / "runs" / name))
    return runs


def _prepared(
    recipe: FinetuneRecipe, invocation: Invocation, accelerator: Accelerator, device: torch.device
) -> _Context:
    """Read the data, check model and data against each other, tokenise."""
    data = open_labelled(
        str(recipe.task),
        source=recipe.data.source,
        train_source=recipe.data.train,
        columns=recipe.data.columns,
        split=recipe.data.split,
        train_rows=recipe.data.train_rows,
        judged_rows=recipe.data.judged_rows,
        log=Progress.say,
    )
    check_training(data)
    if recipe.choose_on is not None and recipe.choose_on not in data.sets:
        raise UsageError(
            f"choose_on {recipe.choose_on} is none of the judged sets: {', '.join(data.sets) or 'there is only one'}"
        )
    headed = _load(recipe, data, invocation)
    Progress.say(f"{recipe.model}: {headed.note}")
    length = recipe.data.max_length or data.task.max_length
    positions = positions_of(headed.model.config)
    if positions is not None and positions < length:
        Progress.say(f"{recipe.model} reads at most {positions} tokens, so data.max_length is {positions}")
        length = positions
    how = {"max_length": length, "stride": recipe.data.stride, "token_types": headed.token_types}
    notes: list[str] = []
    if data.task.kind == "span":
        data, notes = _without_misplaced(data)
    train = Features.of(data.task, data.train, headed.tokenizer, **how)  # type: ignore[arg-type]
    judge = Judge.of(data.task, data.sets, headed.tokenizer, choose_on=recipe.choose_on, **how)
    cut = train.rows.truncated / len(data.train)
    said = "need more than one window of" if data.task.kind == "span" else "were cut at"
    notes.append(f"{cut:.1%} of the training examples {said} {length} tokens")
    if data.split != "validation":
        notes.append(f"judged on {data.split}")
    for note in notes:
        Progress.say(note)
    return _Context(accelerator, device, invocation, data, train, judge, notes)


def _load(recipe: FinetuneRecipe, data: Labelled, invocation: Invocation) -> Headed:
    return load_for_task(
        str(recipe.model),
        data.task,
        label_map=recipe.head.label_map,
        new_head=True,
        seed=recipe.train.seed,
        trust_remote_code=invocation.trust_remote_code,
    )


def _without_misplaced(data: Labelled) -> tuple[Labelled, list[str]]:
    """Leave out training questions whose answer is not in its context, and list them.

    Raises:
        UsageError: they are more than one in a hundred.
    """
    wrong = {i: said for i, e in enumerate(data.train) if (said := misplaced(e)) is not None}
    if not wrong:
        return data, []
    lines = list(wrong.values())
    if len(wrong) > MISPLACED_ALLOWED * len(data.train):
        raise UsageError(
            f"{len(wrong)} of {len(data.train)} answers are not where they are said to be, for example\n"
            + "\n".join(lines[:5]),
            "answer_start counts characters of the context, from 0",
        )
    kept = [e for i, e in enumerate(data.train) if i not in wrong]
    shown = lines[:20] + ([f"… {len(lines) - 20} more"] if len(lines) > 20 else [])
    return replace(data, train=kept), [f"{len(wrong)} training questions were left out:", *shown]


def _job(context: _Context, recipe: FinetuneRecipe, headed: Headed) -> tuple[Job, Plan]:
    """What the engine is handed, and for how long."""
    task, rows = context.data.task, context.train.rows
    listened = capture(headed.model, Needs(logits=True))

    def step(batch: Batch) -> StepLoss:
        labels = batch["labels"]
        logits = listened({k: v for k, v in batch.items() if k != "labels"}).logits
        loss = hard_loss(task.kind, logits, labels, batch["attention_mask"])
        return StepLoss(loss, {}, logits)

    # What the head does not read (a pooler below a token head) would be decayed towards nothing.
    idle = unreached(dict(listened.named_parameters()), step(rows.batch(np.arange(min(2, len(rows))))).total)
    for parameter in idle:
        listened.get_parameter(parameter).requires_grad_(False)
    order = BucketPlan(rows.lengths, recipe.train.batch_size, recipe.train.seed)
    job = Job(
        modules={"model": listened},
        step=step,
        examples=rows,
        order=order,
        held_out=context.judge.features.rows,
        weigh=lambda batch: labelled(task.kind, batch["labels"]),
        judge=context.judge.metrics,
        best=task.metrics[0] if recipe.keep == "best" else None,
    )
    return job, plan_of(recipe.train, order.steps_of_pass)


def _one(context: _Context, of: _Run, *, alone: bool) -> Finished:
    """Train, judge and report one run, or read the report of one that is done."""
    recipe, accelerator, run_dir = of.resolved.recipe, context.accelerator, RunDir(of.folder)
    if not alone and accelerator.is_main_process:
        # A run of a grid lives in the grid's directory and goes on whenever the grid does.
        RunDir.claim(of.folder, of.resolved.to_yaml(), resume=True)
    accelerator.wait_for_everyone()
    if run_dir.done:
        Progress.say(f"{of.folder} is done already")
        return Finished.read(of.folder)
    if not alone:
        Progress.say(f"run {of.folder.name}")
    headed = _load(recipe, context.data, context.invocation)
    job, plan = _job(context, recipe, headed)
    _say_padding(context, recipe)
    outcome = train(accelerator, context.device, job, plan, run_dir)
    if outcome.best_step is not None:
        Progress.say(f"the best weights are those of step {outcome.best_step}")
    outputs = evaluate(accelerator, context.device, job).outputs
    if accelerator.is_main_process:
        save_model(headed.model, headed.tokenizer, of.folder)
        _report(context, of, headed, outcome, outputs, alone)
    accelerator.wait_for_everyone()
    return Finished.read(of.folder)


def _say_padding(context: _Context, recipe: FinetuneRecipe) -> None:
    rows, size = context.train.rows, recipe.train.batch_size
    bucketed = BucketPlan(rows.lengths, size, recipe.train.seed)
    plain = BatchPlan(len(rows), size, recipe.train.seed)
    drawn = [rows.lengths[plain.indices(step)] for step in range(1, min(200, bucketed.steps_of_pass) + 1)]
    random = 1 - sum(int(b.sum()) for b in drawn) / sum(len(b) * int(b.max()) for b in drawn)
    Progress.say(
        f"{len(rows):,} rows of {rows.lengths.mean():.0f} tokens in batches of similar length: "
        f"{bucketed.padding():.1%} padding (drawn at random {random:.1%})"
    )


def _report(context: _Context, of: _Run, headed: Headed, outcome: Outcome, outputs: Any, alone: bool) -> Finished:
    recipe, judge = of.resolved.recipe, context.judge
    predictions = judge.features.predictions(outputs)
    evaluations = judge.evaluations(NAME, context.data.split, predictions, worst=20)
    notes = list(context.notes)
    if outcome.best_step is not None:
        on = recipe.choose_on or ("the mean over all sets" if len(context.data.sets) > 1 else "the judged set")
        notes.append(
            f"the weights of step {outcome.best_step} were kept, by {context.data.task.metrics[0]} on {on}, on which "
            "the scores are also reported"
        )
    return finish(
        RunDir(of.folder),
        command="finetune",
        recipe=recipe.model_dump(),
        cards={NAME: describe(headed.model, str(of.folder), of.folder)},
        folders={NAME: of.folder},
        measured=[(NAME, str(of.folder))],
        measure=recipe.measure if alone else recipe.measure.model_copy(update={"latency": False}),
        device=context.device,
        trust_remote_code=context.invocation.trust_remote_code,
        outcome=outcome,
        quality=_quality(evaluations),
        notes=notes,
        auto_class=AUTO_CLASS[context.data.task.kind].__name__,
        evaluations=evaluations,
    )


def _quality(evaluations: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    return {f"{e['task']} {e['set']}".strip(): {e["model"]: e["metrics"]} for e in evaluations}


def _choose(
    context: _Context, resolved: Resolved[FinetuneRecipe], folder: Path, runs: list[_Run], found: list[Finished]
) -> Finished:
    """The setting with the best mean over its seeds, and its best run, whose model becomes that of the directory."""
    recipe, task = resolved.recipe, context.data.task
    metric = task.metrics[0]
    scores = [summed_up(task, {e.set: e.metrics for e in f.report.evaluations}, recipe.choose_on) for f in found]
    by_setting: dict[str, list[int]] = {}
    for number, of in enumerate(runs):
        by_setting.setdefault(repr(of.settings), []).append(number)
    best = max(by_setting.values(), key=lambda numbers: statistics.fmean(scores[n][metric] for n in numbers))
    chosen = max(best, key=lambda n: scores[n][metric])
    on = recipe.choose_on or ("the mean over all sets" if len(context.data.sets) > 1 else context.data.split)
    for file in sorted(runs[chosen].folder.iterdir()):
        if file.name == WEIGHTS or (file.name.endswith(".json") and file.name != "report.json"):
            shutil.copy2(file, folder / file.name)
    report: Report = found[chosen].report
    selection = {
        "metric": metric,
        "on": on,
        "settings": runs[chosen].settings,
        "seed": runs[chosen].seed,
        "runs": [{"settings": r.settings, "seed": r.seed, "metrics": s} for r, s in zip(runs, scores, strict=True)],
    }
    training = report.training.model_dump() if report.training else {}
    result = finish(
        RunDir(folder),
        command="finetune",
        recipe=recipe.model_dump(),
        cards={NAME: report.models[NAME].model_dump() | {"id": str(folder)}},
        folders={NAME: folder},
        measured=[(NAME, str(folder))],
        measure=recipe.measure,
        device=context.device,
        trust_remote_code=context.invocation.trust_remote_code,
        outcome=Outcome(**training),
        quality=report.quality,
        notes=report.notes,
        auto_class=AUTO_CLASS[task.kind].__name__,
        evaluations=[e.model_dump() for e in report.evaluations],
        selection=selection,
    )
    for of in runs:
        # Their reports, logs and recipes stay; a model that was not chosen can be made again.
        (of.folder / WEIGHTS).unlink(missing_ok=True)
    return result


def _dry_run(context: _Context, runs: list[_Run]) -> Estimate:
    """Train the first run of every setting for a few steps, for what they take, and leave nothing behind."""
    cards: Mapping[str, Any] = {}
    legs = []
    for of in {repr(r.settings): r for r in reversed(runs)}.values():
        recipe = of.resolved.recipe
        headed = _load(recipe, context.data, context.invocation)
        job, plan = _job(context, recipe, headed)
        probe = replace(plan, stop_after=min(plan.steps, PROBE_STEPS))
        outcome = train(context.accelerator, context.device, job, probe, None)
        cards = {NAME: describe(headed.model, NAME, None)}
        seeds = sum(r.settings == of.settings for r in runs)
        leg = estimate_leg(str(of.folder), outcome, plan, len(context.train.rows))
        legs.append(
            replace(leg, folder=f"{leg.folder} ({seeds} seeds)", seconds=seeds * leg.seconds) if seeds > 1 else leg
        )
    return Estimate(cards, legs[::-1])
