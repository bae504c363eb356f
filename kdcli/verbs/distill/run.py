"""`kdcli distill`: distil students of a teacher on text or, with `--task`, on a task.

`--ablate` compares variants of a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kdcli.engine.launch import claim, track
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.losses import on_tasks
from kdcli.recipe.resolve import Resolved, defaulted
from kdcli.recipe.sections import RunOptions
from kdcli.report.combine import combine_reports
from kdcli.report.finish import RunResult
from kdcli.report.own_data import directory_word
from kdcli.report.schema import STUDENT, TEACHER
from kdcli.run.context import RunContext, open_run
from kdcli.run.dry_run import Estimate
from kdcli.run.stages import run_command, run_stages, telling_how_to_continue
from kdcli.verbs.distill.embedding import prepare_embedding, with_learning_rate, with_method
from kdcli.verbs.distill.embedding_checks import check_embedding
from kdcli.verbs.distill.fast import check_goal, check_goals, check_untrained, like_first
from kdcli.verbs.distill.labelled import (
    check_task,
    open_distillation,
    prepare_task,
    read_general,
)
from kdcli.verbs.distill.outputs import check_outputs, prepare_outputs
from kdcli.verbs.distill.recipes import SOFT_TARGETS
from kdcli.verbs.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.verbs.distill.stages import WITHOUT, TaskDistillation
from kdcli.verbs.distill.text import prepare_text
from kdcli.verbs.distill.text_checks import check_text_recipe, read_text
from kdcli.workloads import modules_by_task
from kdcli.workloads.as_trained import as_trained
from kdcli.workloads.embedding import METHOD


def distill(resolved: Resolved[DistillRecipe], options: RunOptions) -> RunResult | Estimate | None:
    """Distil on text, measure and report; see `run_command` for what it returns.

    Raises KdcliError: the recipe, a model or the text cannot be used, or the run fails.
    """
    resolved = with_method(resolved)
    recipe = resolved.recipe
    shapes = "+".join(recipe.student.to) or "student"
    name = f"distill-{Path(str(recipe.teacher)).name}-{shapes}"
    if recipe.method == METHOD:
        check_embedding(recipe)
    else:
        check_text_recipe(recipe)
    check_untrained(recipe)
    check_goal(recipe)
    if recipe.method == METHOD:
        resolved = with_learning_rate(resolved)
        return run_command(resolved, options, name, prepare_embedding)
    read_text(recipe, options)
    return run_command(resolved, options, name, prepare_text)


def distill_on_task(
    resolved: Resolved[TaskDistillRecipe], options: RunOptions
) -> RunResult | Estimate | None:
    """Distil on a task, measure and report; see `run_command` for what it returns.

    Raises KdcliError: the recipe, a model or the data cannot be used, or the run fails.
    """
    resolved = _complete(resolved)
    check_task(resolved.recipe)
    if resolved.recipe.task in modules_by_task():
        check_outputs(resolved.recipe)
    check_goal(resolved.recipe)
    name = _name(resolved.recipe)
    if resolved.recipe.task in modules_by_task():
        return run_command(resolved, options, name, prepare_outputs)
    read_general(resolved.recipe, options)
    return run_command(resolved, options, name, prepare_task)


def _complete(resolved: Resolved[TaskDistillRecipe]) -> Resolved[TaskDistillRecipe]:
    """Fill in the keys that the user did not set.

    They come from the run that trained the teacher, and from the method's authors.
    """
    resolved = as_trained(resolved, resolved.recipe.teacher)
    task = resolved.recipe.task
    if task in modules_by_task():
        resolved = defaulted(resolved, {"method": SOFT_TARGETS}, f"task {task}")
    method = resolved.recipe.method
    kd = {f"kd.{key}": value for key, value in on_tasks(method)[1].items()}
    return defaulted(resolved, kd, f"method {method}")


def _name(recipe: TaskDistillRecipe) -> str:
    teacher = Path(str(recipe.teacher or recipe.soft_labels)).name
    shapes = recipe.student.to or [Path(str(recipe.student.source)).name]
    data = directory_word(str(recipe.task), recipe.data.source)
    return f"distill-{teacher}-{data}-{shapes[0]}"


def distill_variants(
    variants: Mapping[str, Resolved[TaskDistillRecipe]], options: RunOptions
) -> RunResult | None:
    """Distil on a task once for each variant, and compare the students.

    Each variant has its own directory. Returns the report that compares the students; None in a
    process that prints nothing.

    Raises KdcliError: a recipe, a model or the data cannot be used, or a run fails.
    """
    for resolved in variants.values():
        # Check first, because the defaults of a method need a known method.
        check_task(as_trained(resolved, resolved.recipe.teacher).recipe)
    check_goals(variants)
    variants = {name: _complete(resolved) for name, resolved in variants.items()}
    first = next(iter(variants.values()))
    options.check_pushed(len(variants))
    if options.dry_run:
        raise UsageError(
            "--ablate and --dry-run contradict each other",
            "omit --ablate to estimate the recipe itself",
        )
    data = directory_word(str(first.recipe.task), first.recipe.data.source)
    run_name, dtype = f"ablate-{data}", first.recipe.train.dtype
    check_goal(first.recipe)
    for name, resolved in variants.items():
        inside = options.output_dir / name if options.output_dir else None
        read_general(resolved.recipe, replace(options, output_dir=inside))
    context = open_run(first, options, run_name, dtype=dtype)
    if context is None:
        return None
    return _run_variants(context, variants)


def _run_variants(
    context: RunContext[TaskDistillRecipe], variants: Mapping[str, Resolved[TaskDistillRecipe]]
) -> RunResult | None:
    """Run all stages of every variant, and combine their reports."""
    session, folder, options = context.session, context.folder, context.options

    def opened(name: str) -> TaskDistillation:
        inside = folder / name
        return open_distillation(
            context.inside(inside, variants[name], overwrite=options.overwrite)
        )

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
