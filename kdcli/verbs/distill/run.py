"""`kdcli distill`: distil students of a teacher on text or, with `--task`, on a task.

`--ablate` compares variants of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from kdcli.errors import UsageError
from kdcli.losses import on_tasks
from kdcli.recipe.resolve import Resolved, defaulted, set_among
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.own_data import directory_word
from kdcli.report.schema import STUDENT, TEACHER, Report
from kdcli.run.context import RunContext
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, run_command
from kdcli.verbs.distill.fast import like_first
from kdcli.verbs.distill.open_tasks import open_outputs, open_task, read_general
from kdcli.verbs.distill.recipe_checks import check_goals, check_recipe
from kdcli.verbs.distill.settings import ONLY_ON_TASK, ONLY_ON_TEXT, DistillRecipe, Kind
from kdcli.verbs.distill.student_groups import open_text, read_text
from kdcli.verbs.distill.task_stages import WITHOUT
from kdcli.verbs.distill.vectors import open_vectors, with_learning_rate
from kdcli.workloads.as_trained import as_trained
from kdcli.workloads.study import Member, Members, Study, report_on_all, run_study


def _open_rows(context: RunContext[DistillRecipe]) -> Run:
    return open_task(context).run


OPEN: Mapping[Kind, Callable[[RunContext[DistillRecipe]], Run]] = {
    "text": open_text,
    "embedding": open_vectors,
    "rows": _open_rows,
    "outputs": lambda context: open_outputs(context).run,
}
"""The function that checks and opens the models and the data, for each kind of data."""


def distill(resolved: Resolved[DistillRecipe], options: RunOptions) -> RunResult | Estimate | None:
    """Distil, measure and report; see `run_command` for what it returns."""
    resolved = complete(resolved)
    recipe = resolved.recipe
    check_recipe(recipe)
    if recipe.kind == "embedding":
        resolved = with_learning_rate(resolved)
    elif recipe.kind == "text":
        read_text(recipe, options)
    elif recipe.kind == "rows":
        read_general(recipe, options)
    return run_command(resolved, options, run_name(recipe), OPEN[recipe.kind])


def complete(resolved: Resolved[DistillRecipe]) -> Resolved[DistillRecipe]:
    """Fill in the keys that the user did not set from the teacher's files and from the method.

    Raises:
        UsageError: The user set a key that this kind of data has no use for.
    """
    if resolved.recipe.task is None:
        if (name := set_among(resolved, ONLY_ON_TASK)) is not None:
            raise UsageError(f"{name} needs --task", "it belongs to distilling on a task")
        return resolved
    if (name := set_among(resolved, ONLY_ON_TEXT)) is not None:
        raise UsageError(f"{name} belongs to distilling on text, not to distilling on a task")
    resolved = as_trained(resolved, resolved.recipe.teacher)
    method = resolved.recipe.method
    kd = {f"kd.{key}": value for key, value in on_tasks(method)[1].items()}
    return defaulted(resolved, kd, f"method {method}")


def run_name(recipe: DistillRecipe) -> str:
    """Return the name of the run's directory."""
    source = str(recipe.teacher or recipe.soft_labels or recipe.student.source)
    parts = ["distill", Path(source).name]
    if recipe.task is not None:
        parts.append(directory_word(recipe.task, recipe.data.source))
    student = "student" if recipe.student.source is None else Path(recipe.student.source).name
    return "-".join([*parts, "+".join(recipe.student.to).replace(",", "+") or student])


def distill_variants(
    variants: Mapping[str, Resolved[DistillRecipe]], options: RunOptions
) -> RunResult | Estimate | None:
    """Distil on a task once for each variant, and compare the students; see `run_study`."""
    variants = {name: complete(resolved) for name, resolved in variants.items()}
    for resolved in variants.values():
        check_recipe(resolved.recipe)
    check_goals(variants)
    first = next(iter(variants.values()))
    options.check_pushed(len(variants))
    for name, resolved in variants.items():
        inside = options.output_dir / name if options.output_dir else None
        read_general(resolved.recipe, replace(options, output_dir=inside))
    data = directory_word(str(first.recipe.task), first.recipe.data.source)
    members = [Member(name, Path(name), own, OPEN["rows"]) for name, own in variants.items()]
    return run_study(members, first, options, f"ablate-{data}", _check_variants)


def _check_variants(
    context: RunContext[DistillRecipe], members: Members[DistillRecipe]
) -> Study[DistillRecipe]:
    """Open the first variant, and check the objectives of the others with its models."""
    first = members[0]
    inside = context.folder / first.folder
    own = context.inside(inside, first.resolved, overwrite=context.options.overwrite)
    opened = open_task(own)
    chosen = opened.context.resolved
    members = [replace(one, resolved=like_first(chosen, one.resolved)) for one in members]
    for one in members[1:]:
        replace(opened, context=replace(context, resolved=one.resolved)).objectives()
    context = replace(context, resolved=like_first(chosen, context.resolved))
    report = partial(report_on_all, _names, context, members)
    shares = any(one.resolved.recipe.general.run is not None for one in members)
    return Study(members, report, context.resolved, begins_alone=shares)


def _names(report: Report, variant: str) -> dict[str, str]:
    """Name the student of a run by its variant.

    All variants share the teacher. They also share the undistilled student, up to its start.
    """
    return {TEACHER: TEACHER, STUDENT: variant, WITHOUT: WITHOUT}
