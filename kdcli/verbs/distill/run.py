"""`kdcli distill`: distil students of a teacher on text or, with `--task`, on a task.

`--ablate` compares variants of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from kdcli.engine.launch import claim, track
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.losses import on_tasks
from kdcli.recipe.resolve import Resolved, defaulted, set_among
from kdcli.recipe.sections import RunOptions
from kdcli.report.combine import combine_reports
from kdcli.report.finish import RunResult
from kdcli.report.own_data import directory_word
from kdcli.report.schema import STUDENT, TEACHER
from kdcli.run.context import RunContext, open_run
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import Run, run_command, run_stages, telling_how_to_continue
from kdcli.verbs.distill.fast import like_first
from kdcli.verbs.distill.open_tasks import open_outputs, open_task, read_general
from kdcli.verbs.distill.recipe_checks import check_goals, check_recipe
from kdcli.verbs.distill.settings import ONLY_ON_TASK, ONLY_ON_TEXT, DistillRecipe, Kind
from kdcli.verbs.distill.student_groups import open_text, read_text
from kdcli.verbs.distill.task_stages import WITHOUT, TaskDistillation
from kdcli.verbs.distill.vectors import open_vectors, with_learning_rate
from kdcli.workloads.as_trained import as_trained

OPEN: Mapping[Kind, Callable[[RunContext[DistillRecipe]], Run]] = {
    "text": open_text,
    "embedding": open_vectors,
    "rows": lambda context: open_task(context).run,
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
) -> RunResult | None:
    """Distil on a task once for each variant, and compare the students.

    Each variant has its own directory.

    Returns:
        The report that compares the students; None in a process that prints nothing.
    """
    variants = {name: complete(resolved) for name, resolved in variants.items()}
    for resolved in variants.values():
        check_recipe(resolved.recipe)
    check_goals(variants)
    first = next(iter(variants.values()))
    options.check_pushed(len(variants))
    if options.dry_run:
        raise UsageError(
            "--ablate and --dry-run contradict each other",
            "omit --ablate to estimate the recipe itself",
        )
    data = directory_word(str(first.recipe.task), first.recipe.data.source)
    run_name, dtype = f"ablate-{data}", first.recipe.train.dtype
    for name, resolved in variants.items():
        inside = options.output_dir / name if options.output_dir else None
        read_general(resolved.recipe, replace(options, output_dir=inside))
    context = open_run(first, options, run_name, dtype=dtype)
    if context is None:
        return None
    return _run_variants(context, variants)


def _run_variants(
    context: RunContext[DistillRecipe], variants: Mapping[str, Resolved[DistillRecipe]]
) -> RunResult | None:
    """Run all stages of every variant, and combine their reports."""
    session, folder, options = context.session, context.folder, context.options

    def opened(name: str) -> TaskDistillation:
        inside = folder / name
        return open_task(context.inside(inside, variants[name], overwrite=options.overwrite))

    first, *others = variants
    current = opened(first)
    chosen = current.context.resolved
    variants = {name: like_first(chosen, resolved) for name, resolved in variants.items()}
    context = replace(context, resolved=like_first(chosen, context.resolved))
    # Errors of later variants are found before the first variant trains.
    for name in others:
        replace(current, context=replace(context, resolved=variants[name])).objective()
    claim(session, folder, context.resolved, options)
    track(session, folder)
    with telling_how_to_continue(options, folder):
        for name in variants:
            Progress.log(f"variant {name}")
            if name != first:
                current = opened(name)
            own = current.context
            claim(session, own.folder, own.resolved, own.options)
            run_stages(own, current.run)
    session.accelerator.end_training()
    if not session.is_main:
        return None
    # All variants share the teacher. They also share the undistilled student, up to its start.
    reports = {
        name: RunResult.read(folder / name).report.renamed(
            {TEACHER: TEACHER, STUDENT: name, WITHOUT: WITHOUT}
        )
        for name in variants
    }
    notes = [f"{name}: {name}/" for name in variants]
    recipe = context.recipe
    return combine_reports(folder, command="distill", recipe=recipe, reports=reports, notes=notes)
