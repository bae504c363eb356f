"""`kdcli finetune`: fine-tune an encoder on labelled data, with every setting and seed of a grid.

The setting with the best mean over its seeds wins. The result is the model of its best seed.
"""

import shutil
import statistics
from functools import partial
from pathlib import Path

from kdcli.disk import LOCK, RECIPE_FILE, REPORT_FILE, atomic_file
from kdcli.errors import UsageError
from kdcli.manifest import MANIFEST
from kdcli.models.grammar import parse_shape
from kdcli.models.model import Model
from kdcli.recipe.resolve import Resolved, combinations
from kdcli.recipe.sections import RecipeValues, RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import RunRow, Selection
from kdcli.report.text import directory_word
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run
from kdcli.types import Start
from kdcli.workloads import open_workload
from kdcli.workloads.detect import as_trained
from kdcli.workloads.finetuning import drop_weights, finetune_stage, request_of, selected_report
from kdcli.workloads.predictions import summed_up
from kdcli.workloads.requests import required_task
from kdcli.workloads.settings import FinetuneRecipe, SmallerSettings
from kdcli.workloads.study import Member, Members, Study, first_of_each, run_study
from kdcli.workloads.workload import Workload


def finetune(
    resolved: Resolved[FinetuneRecipe], options: RunOptions
) -> RunResult | Estimate | None:
    """Fine-tune, evaluate and report.

    Returns:
        The report, or the estimate of a dry run. With several runs, this is the report of the
        chosen run. None in a process that prints nothing.

    Raises:
        KdcliError: The run fails. If the recipe, the model or the data cannot be used, nothing is
            written.
    """
    recipe = resolved.recipe
    if recipe.model is None:
        raise UsageError(
            "no model given",
            "kdcli finetune MODEL --task TASK; MODEL is a hub id, a directory or 'demo'",
        )
    resolved = as_trained(resolved, recipe.model)
    recipe = resolved.recipe
    task = required_task(recipe.task)
    check_grid([values for values, _ in combinations(resolved)])
    data = directory_word(task, recipe.data.source)
    name = f"finetune-{Path(str(recipe.model)).name}-{data}"
    return run_study(_members(resolved), resolved, options, name, _check)


def check_grid(settings: list[RecipeValues]) -> None:
    """Check the settings of a grid.

    Raises:
        UsageError: A key that all runs share, a value that is a list, or a repeated setting.
    """
    for number, values in enumerate(settings):
        for key, value in values.items():
            if key == "train.seed":
                raise UsageError(
                    "grid.train.seed: a seed is not a setting",
                    "--seeds N runs every setting with N seeds",
                )
            if (key != "keep" and not key.startswith("train.")) or key == "train.dtype":
                raise UsageError(
                    f"grid.{key}: the runs of a grid share model, data and number format",
                    "a grid holds keys of train, or keep; for other keys, start one run per value",
                )
            if not isinstance(value, float | int | str):
                raise UsageError(f"grid.{key} must hold numbers or words, got {value!r} among them")
        if values in settings[:number]:
            repeated = ", ".join(f"{key}={value}" for key, value in values.items())
            raise UsageError(
                f"the grid holds {repeated} twice",
                "give every value once; --seeds N repeats a setting",
            )


def _members(resolved: Resolved[FinetuneRecipe]) -> list[Member[FinetuneRecipe]]:
    """Return a run for every setting of the grid and every seed."""
    recipe, settings = resolved.recipe, combinations(resolved)
    several = len(settings) * recipe.seeds > 1
    if several and recipe.student != SmallerSettings():
        raise UsageError(
            "student.to makes the model smaller, and the runs of a grid share the model",
            "save the smaller model first, with kdcli distill MODEL --to LxH --max-steps 0",
        )
    members = []
    for values, setting in settings:
        variant = ", ".join(f"{key}={value}" for key, value in values.items())
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]
        for seed in range(recipe.train.seed, recipe.train.seed + recipe.seeds):
            train = setting.recipe.train.model_copy(update={"seed": seed})
            own = Resolved(setting.recipe.model_copy(update={"train": train}), setting.origins)
            folder = "runs/" + ",".join([*parts, f"seed={seed}"]).replace("/", "_")
            prepare = partial(_prepare, measured=not several)
            members.append(Member(variant, Path(folder), own, prepare))
    return members


def _prepare(context: RunContext[FinetuneRecipe], *, measured: bool) -> Run:
    """Check model and data, and tokenise, without claiming the run directory."""
    recipe = context.recipe
    workload, model = open_workload(
        request_of(recipe, str(recipe.model), generates=True), context.session
    )
    workload.require_labels()
    start = smaller(workload, model, recipe)
    own, folder = context.resolved, context.folder
    return Run([finetune_stage(context, workload, own, folder, model=start, measured=measured)])


def smaller(workload: Workload, model: Model, recipe: FinetuneRecipe) -> Model:
    """Return the model that the training starts from, in the recipe's shape.

    Raises:
        UsageError: The model cannot have this shape, initialisation or choice of layers.
    """
    student, full = recipe.student, model.shape
    if student == SmallerSettings():
        return model
    shape = full if student.to is None else parse_shape(student.to, full)
    start = Start(student.init, student.layers, seed=recipe.train.seed)
    made: Model = workload.student(model, shape, start)
    return made


def _check(
    context: RunContext[FinetuneRecipe], members: Members[FinetuneRecipe]
) -> Study[FinetuneRecipe]:
    """Check model and data, which all runs share.

    Raises:
        UsageError: Two settings give the same training.
    """
    recipe = context.recipe
    workload, _ = open_workload(
        request_of(recipe, str(recipe.model), generates=True), context.session
    )
    schedules: dict[str, str] = {}
    for member in first_of_each(members):
        own = member.resolved.recipe
        schedule = workload.plan(own.train).schedule
        # Settings that differ in epochs alone may still have the same number of steps.
        in_schedule = {"epochs", "max_steps", "warmup_steps", "warmup_fraction"}
        others = own.train.model_dump(exclude=in_schedule)
        same = schedules.setdefault(repr((schedule, own.keep, others)), member.variant)
        if same != member.variant:
            raise UsageError(
                f"the grid's {same} and {member.variant} give the same training: "
                f"{schedule.steps} steps, {schedule.warmup_steps} of warm-up",
                "omit one of them",
            )
    return Study(members, partial(_report_grid, context, workload, members))


def _report_grid(
    context: RunContext[FinetuneRecipe], workload: Workload, members: Members[FinetuneRecipe]
) -> None:
    """Choose the best run, copy its model and report."""
    recipe, metric = context.recipe, workload.metric
    folders = [context.folder / member.folder for member in members]
    results = [RunResult.read(folder) for folder in folders]
    scores = [
        summed_up({e.set: e.metrics for e in result.report.evaluations}, recipe.choose_on)
        for result in results
    ]
    settings = [values for values, _ in combinations(context.resolved) for _ in range(recipe.seeds)]
    of_settings = [
        range(first, first + recipe.seeds) for first in range(0, len(members), recipe.seeds)
    ]
    best = max(of_settings, key=lambda rows: statistics.fmean(scores[n][metric] for n in rows))
    chosen = max(best, key=lambda n: scores[n][metric])
    rows = [
        RunRow(settings=values, seed=member.resolved.recipe.train.seed, metrics=metrics)
        for values, member, metrics in zip(settings, members, scores, strict=True)
    ]
    # Copy the model, the tokenizer and log.jsonl.
    for file in folders[chosen].iterdir():
        if file.is_file() and file.name not in (LOCK, MANIFEST, RECIPE_FILE, REPORT_FILE):
            with file.open("rb") as whole, atomic_file(context.folder / file.name) as copy:
                shutil.copyfileobj(whole, copy)
    selection = Selection(
        metric=metric,
        on=workload.evaluated_on,
        settings=rows[chosen].settings,
        seed=rows[chosen].seed,
        runs=rows,
    )
    selected_report(context, workload, results[chosen], selection)
    for folder in folders:
        drop_weights(folder)
