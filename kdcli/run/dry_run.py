"""`--dry-run`: estimate the cost of a run from a few of its steps."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import broadcast
from rich.table import Column, Table

from kdcli.engine.session import Session
from kdcli.engine.train import train
from kdcli.report.text import bytes_of, card_shape, count, duration
from kdcli.types import Card, Job, Schedule

PROBE_STEPS = 4  # one step to warm up, three to time
# If these steps are quicker than PROBE_SECONDS, more are timed to fill it, because the times of
# three short steps are unreliable on a shared machine.
PROBE_SECONDS, MAX_PROBE_STEPS = 2.0, 32


@dataclass(frozen=True)
class StageEstimate:
    """The estimated cost of one stage.

    Attributes:
        folder: The run directory of the stage.
        steps: Number of optimiser steps, or of batches where nothing is trained.
        passes: Number of passes over the data.
        seconds: Expected time of these steps.
        seconds_per_step: Mean time of one step.
        peak_memory_bytes: Peak memory.
    """

    folder: str
    steps: int
    passes: float
    seconds: float
    seconds_per_step: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Estimate:
    """The result of a dry run.

    Attributes:
        cards: name -> the size of a model.
        stages: The estimates of all stages, in order.
    """

    cards: Mapping[str, Card]
    stages: list[StageEstimate]

    def to_json(self) -> str:
        """Return the estimate as JSON. Stages are called `legs` there."""
        cards = {name: asdict(card) for name, card in self.cards.items()}
        legs = [asdict(stage) for stage in self.stages]
        return json.dumps({"models": cards, "legs": legs}, indent=2)

    def renderables(self) -> Iterable[object]:
        """Yield the tables and lines for the terminal."""
        models = Table("model", "shape", "parameters", "weights", "multiply-adds")
        for name, card in self.cards.items():
            sizes = count(card.params_total), bytes_of(card.bytes), count(card.multiply_adds)
            models.add_row(name, card_shape(card), *(("", "", "") if card.is_served else sizes))
        yield models
        # The paths of stages differ at their ends, so they are wrapped instead of truncated.
        stages = Table(
            Column("run", overflow="fold"), "steps", "passes", "a step", "time", "peak memory"
        )
        for stage in self.stages:
            cells = [f"{stage.steps:,}", f"{stage.passes:.2f}", f"{stage.seconds_per_step:.3g} s"]
            stages.add_row(
                stage.folder, *cells, duration(stage.seconds), bytes_of(stage.peak_memory_bytes)
            )
        yield stages
        yield "estimated from a few steps; nothing was written"


def estimate_stage(
    session: Session, job: Job, schedule: Schedule, folder: Path, steps_of_pass: float
) -> StageEstimate:
    """Estimate the cost of a stage from a few training steps, without writing anything.

    The first step is a warm-up. The mean of the other steps is the time per step. The time of
    evaluations is added.

    Args:
        session: Device, precision and processes.
        job: The training job.
        schedule: Number of steps and learning rates.
        folder: The run directory of the stage.
        steps_of_pass: Number of steps in one pass over the data.
    """
    # Without labels, metrics compare with a teacher's answers, which a dry run does not compute.
    job = replace(job, compute_metrics=None)
    outcome = train(
        session, job, replace(schedule, stop_after=min(schedule.steps, PROBE_STEPS)), None
    )
    if not schedule.steps:
        peak = outcome.peak_memory_bytes
        return StageEstimate(str(folder), 0, 0.0, outcome.evaluation_seconds, 0.0, peak)
    step_seconds = statistics.mean(outcome.step_seconds[1:] or outcome.step_seconds)
    wanted = min(schedule.steps, MAX_PROBE_STEPS, math.ceil(PROBE_SECONDS / step_seconds))
    # All processes must run the same number of steps.
    if (steps := int(broadcast(torch.tensor([wanted], device=session.device)))) > PROBE_STEPS:
        outcome = train(session, job, replace(schedule, stop_after=steps), None)
        step_seconds = statistics.mean(outcome.step_seconds[1:])
    evaluations = 1 + -(-schedule.steps // schedule.eval_every)
    seconds = schedule.steps * step_seconds + evaluations * outcome.evaluation_seconds
    return StageEstimate(
        str(folder),
        schedule.steps,
        schedule.steps / steps_of_pass,
        seconds,
        step_seconds,
        outcome.peak_memory_bytes,
    )
