"""The stages of a run: trained one after another, or each for a few steps in a dry run."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kdcli.engine.launch import Session, already_done, claim, claim_or_resume, launch, track
from kdcli.engine.run_dir import RunDir
from kdcli.engine.train import train
from kdcli.errors import UsageError
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.run.dry_run import Estimate, StageEstimate, estimate_stage
from kdcli.types import Card, Job, Outcome, Schedule


@dataclass(frozen=True)
class StageJob:
    """What a stage trains."""

    job: Job
    schedule: Schedule
    steps_per_pass: float  # Optimiser steps of one pass over the data
    cards: Mapping[str, Card] = field(
        default_factory=dict
    )  # The models, for the table of a dry run
    repeats: int = (
        1  # How often it is run alike, such as with several seeds; only a dry run counts them
    )


class Stage(Protocol):
    """One training in a run directory of its own, `folder`; the recipe `resolved` alone repeats it."""

    @property
    def folder(self) -> Path: ...
    @property
    def resolved(self) -> Any: ...
    def build(self) -> StageJob:
        """Load models and make the job; writes nothing that a finished run shows."""

    def finish(self, outcome: Outcome) -> None:
        """Save the models; in the main process also write the stage's report, if it has one of its own."""


class Run(Protocol):
    """A checked command: its recipe `resolved`, its stages in order, and what is left to do after them; stages in other
    directories than its output `folder` are claimed on their turn."""

    @property
    def folder(self) -> Path: ...
    @property
    def resolved(self) -> Any: ...
    @property
    def invocation(self) -> RunOptions: ...
    @property
    def stages(self) -> Sequence[Stage]: ...
    def report(self) -> None:
        """Write report.json of `folder` where the last stage did not; called in every process."""


def run_command(
    resolved: Any, invocation: RunOptions, prepare: Callable[[Any, RunOptions, Session], Run]
) -> RunResult | Estimate | None:
    """Start the processes, prepare, then estimate or train every stage.

    `prepare` checks and loads everything a later stage needs and writes nothing; nothing was claimed if it raised a
    KdcliError. Returns None in a process that prints nothing, and for a run that
    `RunOptions.stop_after` paused.
    """
    if (session := launch(resolved.recipe.train.dtype, invocation)) is None:
        return None
    run = prepare(resolved, invocation, session)
    if invocation.dry_run:
        return dry_run(session, run)
    claim(session, run.folder, run.resolved, invocation)
    track(session, run.folder)
    try:
        finished = run_stages(session, run)
    except UsageError:
        if session.is_main:
            RunDir(run.folder).give_up()
        raise
    session.wait()
    session.accelerator.end_training()
    return RunResult.read(run.folder) if finished and session.is_main else None


def run_stages(session: Session, run: Run) -> bool:
    """Train every stage that is not done, then report. Return False if `stop_after` paused one."""
    if already_done(session, run.folder):
        return True
    stages = list(run.stages)
    for stage in stages:
        # Only an empty directory can be claimed, so one that contains another stage's is claimed first.
        for outer in stages:
            if outer.folder in stage.folder.parents and outer.folder != run.folder:
                claim_or_resume(session, outer.folder, outer.resolved)
        own = stage.folder == run.folder
        stop_after = run.invocation.stop_after if own else None
        if not run_stage(session, stage, claimed=own, stop_after=stop_after):
            return False
    run.report()
    session.wait()
    return True


def run_stage(
    session: Session, stage: Stage, *, claimed: bool = False, stop_after: int | None = None
) -> bool:
    """Train one stage unless it is done. Return False if `stop_after` paused it before its end.

    `claimed` says that the stage's directory is the run's own.
    """
    if not claimed and claim_or_resume(session, stage.folder, stage.resolved):
        return True
    built = stage.build()
    schedule = replace(built.schedule, stop_after=stop_after)
    outcome = train(session, built.job, schedule, RunDir(stage.folder))
    if outcome.finished:
        stage.finish(outcome)
    session.wait()
    return outcome.finished


def dry_run(session: Session, run: Run) -> Estimate:
    """Train every stage for a few steps and leave nothing behind."""
    cards: dict[str, Card] = {}
    estimates: list[StageEstimate] = []
    for stage in run.stages:
        # The copy holds the loaded model, and is gone before the next stage.
        built = copy.copy(stage).build()
        cards |= built.cards
        one = estimate_stage(session, built.job, built.schedule, stage.folder, built.steps_per_pass)
        if built.repeats > 1:
            more = f"{one.folder} and {built.repeats - 1} more seeds"
            one = replace(one, folder=more, seconds=built.repeats * one.seconds)
        estimates.append(one)
    return Estimate(cards, estimates)
