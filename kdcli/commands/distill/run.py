"""`kdcli distill`: students of a teacher, on text or, with `--task`, on a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kdcli.commands.distill.augment import Copies, written_copies
from kdcli.commands.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.commands.distill.task import TaskRun, check_task, check_teacher, prepare_copies, prepare_task
from kdcli.commands.distill.task_run import probe_task, run_task, together
from kdcli.commands.distill.text import check_text, prepare_text, probe_text, run_text
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.dry_run import Estimate
from kdcli.report.finish import RunResult
from kdcli.training.launch import choose_output_dir, claim, launch, run_command
from kdcli.training.progress import Progress
from kdcli.training.session import track


def run(resolved: Resolved[DistillRecipe], invocation: Invocation) -> RunResult | Estimate | None:
    """Distil on text, measure and report.

    Returns:
        The report of the last leg, or the estimate of a dry run; None in a process that has nothing to print.

    Raises:
        KdcliError: see `kdcli.errors`; nothing was claimed or written if the recipe, models or data cannot be used.
    """
    check_text(resolved.recipe)
    return run_command(resolved, invocation, prepare=prepare_text, probe=probe_text, run=run_text)


def run_on_task(resolved: Resolved[TaskDistillRecipe], invocation: Invocation) -> RunResult | Estimate | None:
    """Distil on a task, measure and report; returns and raises as `run`."""
    check_task(resolved.recipe)
    return run_command(resolved, invocation, prepare=prepare_task, probe=probe_task, run=run_task)


def run_variants(variants: Mapping[str, Resolved[TaskDistillRecipe]], invocation: Invocation) -> RunResult | None:
    """Distil on a task once for each variant of a recipe, each in a directory of its own, and compare their students.

    Returns:
        The report that compares them, the first variant first; None in a process that has nothing to print.

    Raises:
        UsageError: an option that is not for several runs; see `run_on_task` for the rest.
    """
    first = next(iter(variants.values()))
    if invocation.dry_run:
        raise UsageError("--ablate and --dry-run do not go together", "estimate the recipe itself: leave --ablate out")
    for resolved in variants.values():
        check_task(resolved.recipe)
    session = launch(first.recipe.train.dtype, invocation)
    if session is None:
        return None
    folder = choose_output_dir(f"ablate-{first.recipe.task}", first, invocation, session)

    def prepared(name: str) -> TaskRun:
        inside = replace(invocation, output_dir=folder / name, resume=not invocation.overwrite)
        return prepare_task(variants[name], inside, session)

    # What a later variant would stumble over is found before the first begins.
    task = prepared(next(iter(variants)))
    for resolved in variants.values():
        replace(task, resolved=resolved).objective()
    claim(replace(task, folder=folder, resolved=first, invocation=invocation), session)
    track(session, folder)
    found: dict[str, RunResult | None] = {}
    for number, name in enumerate(variants):
        Progress.log(f"variant {name}")
        task = prepared(name) if number else task
        claim(task, session)
        found[name] = run_task(task)
    result = together(folder, found) if session.is_main else None
    session.accelerator.end_training()
    return result


def write_copies(resolved: Resolved[TaskDistillRecipe], invocation: Invocation, file: Path) -> Copies | None:
    """Write the copies that `--augment` would train on, and nothing else.

    Raises:
        KdcliError: as `run_on_task`; there is such a file, and it is not to be overwritten.
    """
    check_teacher(resolved.recipe)
    if file.is_dir() or not file.parent.is_dir():
        raise UsageError(
            f"--augment-only {file}: {'it is a directory' if file.is_dir() else 'its directory is not there'}"
        )
    if file.exists() and not invocation.overwrite:
        raise UsageError(f"--augment-only {file}: there is such a file", "--overwrite replaces it; or name another")
    # One process is enough, however many would train.
    session = launch(resolved.recipe.train.dtype, replace(invocation, dry_run=True))
    if session is None:
        return None
    recipe = resolved.recipe
    made_of = prepare_copies(resolved, invocation, session)
    return written_copies(recipe.augment, *made_of, seed=recipe.train.seed, file=file)
