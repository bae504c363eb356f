"""`--dry-run`: estimate the cost of a run from a few of its steps."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from rich.table import Column, Table

from kdcli.engine.launch import Session
from kdcli.engine.train import train
from kdcli.report.text import bytes_of, count, duration
from kdcli.types import Card, Job, Schedule

PROBE_STEPS = 4  # Steps of a dry run: one to warm up, three to time
# Where these take less, as many as fill the seconds: three short steps say little on a machine that
# others use.
PROBE_SECONDS, PROBE_STEPS_MOST = 2.0, 32


@dataclass(frozen=True)
class StageEstimate:
    """One stage: its optimiser steps, passes over the data, expected seconds of training and peak
    memory."""

    folder: str
    steps: int
    passes: float
    seconds: float
    seconds_per_step: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Estimate:
    """The result of a dry run."""

    cards: Mapping[str, Card]
    stages: list[StageEstimate]

    def to_json(self) -> str:
        cards = {name: asdict(card) for name, card in self.cards.items()}
        legs = [asdict(stage) for stage in self.stages]
        return json.dumps({"models": cards, "legs": legs}, indent=2)

    def renderables(self) -> Iterable[Any]:
        models = Table("model", "shape", "parameters", "weights", "multiply-adds")
        for name, card in self.cards.items():
            shape, parameters = f"{card.layers}x{card.hidden}", count(card.params_total)
            size, operations = bytes_of(card.bytes), count(card.multiply_adds)
            models.add_row(name, shape, parameters, size, operations)
        yield models
        # Stages of one run differ in the end of their paths.
        stages = Table(
            Column("run", overflow="fold"), "steps", "passes", "a step", "training", "peak memory"
        )
        for stage in self.stages:
            cells = [f"{stage.steps:,}", f"{stage.passes:.2f}", f"{stage.seconds_per_step:.3g} s"]
            stages.add_row(
                stage.folder, *cells, duration(stage.seconds), bytes_of(stage.peak_memory_bytes)
            )
        yield stages
        yield "from a few steps run just now; nothing was written"


def estimate_stage(
    session: Session, job: Job, schedule: Schedule, folder: Path, steps_of_pass: float
) -> StageEstimate:
    """Train for a few steps, writing nothing, and scale up what they take. The first step warms up,
    the mean of the others is the time of a step; evaluations come on top."""
    outcome = train(
        session, job, replace(schedule, stop_after=min(schedule.steps, PROBE_STEPS)), None
    )
    a_step = statistics.mean(outcome.step_seconds[1:] or outcome.step_seconds)
    more = min(schedule.steps, PROBE_STEPS_MOST, math.ceil(PROBE_SECONDS / a_step))
    # Every process must take as many.
    if (steps := int(broadcast(torch.tensor([more], device=session.device)))) > PROBE_STEPS:
        outcome = train(session, job, replace(schedule, stop_after=steps), None)
        a_step = statistics.mean(outcome.step_seconds[1:])
    evaluations = 1 + -(-schedule.steps // schedule.eval_every)
    seconds = schedule.steps * a_step + evaluations * outcome.evaluation_seconds
    return StageEstimate(
        str(folder),
        schedule.steps,
        schedule.steps / steps_of_pass,
        seconds,
        a_step,
        outcome.peak_memory_bytes,
    )
