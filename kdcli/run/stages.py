"""Runs and their stages, which are trained in order, or estimated in a dry run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from kdcli.engine.launch import already_done, claim, claim_or_resume, track
from kdcli.engine.processes import INTERRUPTED, StopRequest, stop_requests
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session
from kdcli.engine.train import train
from kdcli.errors import Interrupted, Stopped, UsageError
from kdcli.recipe.resolve import RecipeT, Resolved
from kdcli.recipe.sections import RunOptions, Section, TrainSettings
from kdcli.report.finish import RunResult
from kdcli.run.context import RunContext, open_run
from kdcli.run.dry_run import Estimate, StageEstimate, estimate_stage
from kdcli.types import Card, Job, Outcome, Schedule


@runtime_checkable
class TrainedRecipe(Protocol):
    """The recipe of a verb that trains models."""

    @property
    def train(self) -> TrainSettings:
        """How to train them."""


@dataclass(frozen=True)
class StageJob:
    """The training job of a stage and the function that finishes the stage.

    Attributes:
        job: The training job.
        schedule: Number of steps and learning rates.
        steps_per_pass: Number of optimiser steps in one pass over the data.
        finish: Saves the trained models and, in the main process, writes the report of a stage that
            has its own. It is called in every process.
        cards: name -> the size of a model, for a dry run.
    """

    job: Job
    schedule: Schedule
    steps_per_pass: float
    finish: Callable[[Outcome], None]
    cards: Mapping[str, Card] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A training run with its own run directory.

    Attributes:
        folder: The stage's run directory.
        resolved: The recipe that reproduces the stage by itself.
        build: Loads the models and builds the job. It writes nothing that is part of a finished
            run.
    """

    folder: Path
    resolved: Resolved[Section]
    build: Callable[[], StageJob]


@dataclass(frozen=True)
class Run:
    """The stages and the report of a command whose arguments have been checked.

    Attributes:
        stages: The stages, in order. The directory of a stage is claimed when the stage starts,
            unless it is the run directory.
        resolved: The recipe to store in the run directory, if preparing the run changed it.
        report: Writes `report.json` in the run directory if the last stage does not. It is called
            in every process.
        estimate: Estimates the run; None estimates its stages.
    """

    stages: Sequence[Stage]
    report: Callable[[], None] | None = None
    resolved: Resolved[Section] | None = None
    estimate: Callable[[], Estimate] | None = None


def run_command(
    resolved: Resolved[RecipeT],
    options: RunOptions,
    name: str,
    prepare: Callable[[RunContext[RecipeT]], Run],
) -> RunResult | Estimate | None:
    """Start the processes, prepare the run, then estimate or train every stage.

    Args:
        resolved: The recipe.
        options: The options of the run.
        name: Name of the run directory, unless the options give a directory.
        prepare: Checks and loads everything that the stages need, and writes nothing.

    Returns:
        The report, or the estimate of a dry run; None in a process that prints nothing.

    Raises:
        KdcliError: The run cannot be prepared or a stage fails. If `prepare` raises the error, no
            directory has been claimed.
    """
    recipe = resolved.recipe
    assert isinstance(recipe, TrainedRecipe)
    context = open_run(resolved, options, name, dtype=recipe.train.dtype)
    if context is None:
        return None
    run = prepare(context)
    if context.dry_run:
        return run.estimate() if run.estimate is not None else dry_run(context.session, run)
    session, folder = context.session, context.folder
    claim(session, folder, run.resolved or resolved, options)
    track(session, folder)
    try:
        with stoppable(options, folder):
            finished = run_stages(context, run)
    except UsageError:
        if session.is_main:
            RunDir(folder).give_up()
        raise
    session.wait()
    session.accelerator.end_training()
    return RunResult.read(folder) if finished and session.is_main else None


@contextmanager
def stoppable(options: RunOptions, folder: Path) -> Iterator[StopRequest]:
    """Let SIGTERM and Ctrl-C stop a run whose directory is claimed, and tell how to continue it.

    Raises:
        Stopped: The run was stopped, also outside of a training. The hint names the command.
        Interrupted: It was stopped twice, so that nothing more was saved.
    """
    # The recipe may be that of a step of the command, as in `compress`.
    verb = next(iter(options.arguments), "")
    hint = f"continue with: {options.continuing_command(verb, folder)}"
    try:
        with stop_requests(at_once=True) as stop:
            try:
                yield stop
            except KeyboardInterrupt:
                if stop.insisted or not stop.signalled:
                    raise Interrupted(INTERRUPTED, hint) from None
                raise Stopped("stopped before the run was finished") from None
    except Stopped as stopped:
        raise Stopped(stopped.message, hint) from None
    except Interrupted as ended:
        # Without a hint, nothing was written that could be continued.
        raise Interrupted(ended.message, hint if ended.hint else None) from None


def run_stages(context: RunContext[Section], run: Run) -> bool:
    """Train every unfinished stage, then write the report.

    Returns:
        False if a stage ended early, at `RunOptions.stop_after`.
    """
    session, folder = context.session, context.folder
    if already_done(session, folder):
        return True
    for stage in run.stages:
        # Only an empty directory can be claimed, so outer directories must be claimed first.
        for outer in run.stages:
            if outer.folder in stage.folder.parents and outer.folder != folder:
                claim_or_resume(session, outer.folder, outer.resolved)
        if not run_stage(context, stage, claimed=stage.folder == folder):
            return False
    if run.report is not None:
        run.report()
    session.wait()
    return True


def run_stage(context: RunContext[Section], stage: Stage, *, claimed: bool = False) -> bool:
    """Train one stage unless it is finished.

    Args:
        context: The run.
        stage: The stage.
        claimed: Whether the stage uses the run directory, which is already claimed.

    Returns:
        False if the stage ended early, at `RunOptions.stop_after`.
    """
    session = context.session
    if not claimed and claim_or_resume(session, stage.folder, stage.resolved):
        return True
    stage_job = stage.build()
    # Only the stage in the run directory may stop early.
    stop_after = context.options.stop_after if claimed else None
    schedule = replace(stage_job.schedule, stop_after=stop_after)
    outcome = train(session, stage_job.job, schedule, RunDir(stage.folder))
    if outcome.finished:
        stage_job.finish(outcome)
    session.wait()
    return outcome.finished


def dry_run(session: Session, run: Run) -> Estimate:
    """Estimate every stage from a few training steps. Nothing is written."""
    cards: dict[str, Card] = {}
    estimates: list[StageEstimate] = []
    for stage in run.stages:
        # Stages are built one at a time, because the models of all stages may not fit in memory.
        stage_job = stage.build()
        cards |= stage_job.cards
        estimate = estimate_stage(
            session, stage_job.job, stage_job.schedule, stage.folder, stage_job.steps_per_pass
        )
        estimates.append(estimate)
    return Estimate(cards, estimates)
