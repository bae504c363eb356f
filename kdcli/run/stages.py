"""A run and its stages: trained one after another, or each for a few steps in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kdcli.engine.launch import Session, already_done, claim, claim_or_resume, track
from kdcli.engine.run_dir import RunDir
from kdcli.engine.train import train
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.run.context import RecipeT, RunContext, open_run
from kdcli.run.dry_run import Estimate, StageEstimate, estimate_stage
from kdcli.types import Card, Job, Outcome, Schedule


@dataclass(frozen=True)
class StageJob:
    """The training of a stage, and a function that finishes the stage.

    Attributes:
        job, schedule: for the engine.
        steps_per_pass: optimiser steps in one pass over the data.
        finish: saves the trained models and, in the main process, writes the stage's report if it
            has one of its own. Called in every process.
        cards: descriptions of the models, for the table of a dry run.
        repeats: how many times the stage runs, for instance once per seed. Only a dry
            run counts them.
    """

    job: Job
    schedule: Schedule
    steps_per_pass: float
    finish: Callable[[Outcome], None]
    cards: Mapping[str, Card] = field(default_factory=dict)
    repeats: int = 1


@dataclass(frozen=True)
class Stage:
    """One training in a run directory of its own.

    Attributes:
        folder: the stage's run directory.
        resolved: the recipe that alone repeats the stage.
        build: loads the models and makes the job. It writes nothing that a finished run shows.
    """

    folder: Path
    resolved: Resolved[Any]
    build: Callable[[], StageJob]


@dataclass(frozen=True)
class Run:
    """The stages of a checked command, in order, and its report.

    Attributes:
        stages: those in other directories than the run's own are claimed on their turn.
        report: writes report.json of the run's directory if the last stage did not. Called in
            every process.
    """

    stages: Sequence[Stage]
    report: Callable[[], None] | None = None


def run_command(
    resolved: Resolved[RecipeT],
    options: RunOptions,
    name: str,
    prepare: Callable[[RunContext[RecipeT]], Run],
) -> RunResult | Estimate | None:
    """Start the processes, prepare the run, then estimate or train every stage.

    Args:
        name: of the run directory, unless the options give another.
        prepare: checks and loads everything that a later stage needs, and writes nothing.

    Returns:
        The report, or the estimate of a dry run; None in a process that prints nothing.

    Raises:
        KdcliError: see `kdcli.errors`. Nothing was claimed if `prepare` raised it.
    """
    recipe: Any = resolved.recipe
    context = open_run(resolved, options, name, dtype=recipe.train.dtype)
    if context is None:
        return None
    run = prepare(context)
    if context.dry_run:
        return dry_run(context.session, run)
    session, folder = context.session, context.folder
    claim(session, folder, resolved, options)
    track(session, folder)
    try:
        finished = run_stages(context, run)
    except UsageError:
        if session.is_main:
            RunDir(folder).give_up()
        raise
    session.wait()
    session.accelerator.end_training()
    return RunResult.read(folder) if finished and session.is_main else None


def run_stages(context: RunContext[Any], run: Run) -> bool:
    """Train every stage that is not done, then report.

    Returns:
        False if a stage ended early, at `RunOptions.stop_after`.
    """
    session, folder = context.session, context.folder
    if already_done(session, folder):
        return True
    for stage in run.stages:
        # Only an empty directory can be claimed, so a directory around another stage's comes first.
        for outer in run.stages:
            if outer.folder in stage.folder.parents and outer.folder != folder:
                claim_or_resume(session, outer.folder, outer.resolved)
        if not run_stage(context, stage, claimed=stage.folder == folder):
            return False
    if run.report is not None:
        run.report()
    session.wait()
    return True


def run_stage(context: RunContext[Any], stage: Stage, *, claimed: bool = False) -> bool:
    """Train one stage unless it is done.

    Args:
        claimed: the stage's directory is the run's own, which is claimed already.

    Returns:
        False if the stage ended early, at `RunOptions.stop_after`.
    """
    session = context.session
    if not claimed and claim_or_resume(session, stage.folder, stage.resolved):
        return True
    built = stage.build()
    # A stage inside the run always trains to its end.
    stop_after = context.options.stop_after if claimed else None
    schedule = replace(built.schedule, stop_after=stop_after)
    outcome = train(session, built.job, schedule, RunDir(stage.folder))
    if outcome.finished:
        built.finish(outcome)
    session.wait()
    return outcome.finished


def dry_run(session: Session, run: Run) -> Estimate:
    """Train every stage for a few steps and leave nothing behind."""
    cards: dict[str, Card] = {}
    estimates: list[StageEstimate] = []
    for stage in run.stages:
        # The models of a stage are gone before the next one is built.
        built = stage.build()
        cards |= built.cards
        one = estimate_stage(session, built.job, built.schedule, stage.folder, built.steps_per_pass)
        if built.repeats > 1:
            more = f"{one.folder} and {built.repeats - 1} more seeds"
            one = replace(one, folder=more, seconds=built.repeats * one.seconds)
        estimates.append(one)
    return Estimate(cards, estimates)
