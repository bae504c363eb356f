"""What a run would cost, from a few steps of it: `--dry-run`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Column, Table

from kdcli.report.text import bytes_of, count, duration
from kdcli.types import Outcome, Plan

PROBE_STEPS = 4
"""Steps of a dry run: one to warm up, three to time."""


@dataclass(frozen=True)
class LegEstimate:
    """One leg: its optimiser steps, passes over the data, expected seconds of training and peak memory."""

    folder: str
    steps: int
    passes: float
    seconds: float
    seconds_per_step: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Estimate:
    """The result of a dry run."""

    cards: Mapping[str, Mapping[str, Any]]
    legs: list[LegEstimate]

    def to_json(self) -> str:
        """Models and legs."""
        return json.dumps({"models": dict(self.cards), "legs": [asdict(leg) for leg in self.legs]}, indent=2)

    def renderables(self) -> Iterable[Any]:
        """A table of models and one of legs."""
        models = Table("model", "shape", "parameters", "weights", "multiply-adds")
        for name, card in self.cards.items():
            models.add_row(
                name,
                f"{card['layers']}x{card['hidden']}",
                count(card["params_total"]),
                bytes_of(card["bytes"]),
                count(card["multiply_adds"]),
            )
        yield models
        # Stages of one run differ in the end of their paths.
        legs = Table(Column("run", overflow="fold"), "steps", "passes", "a step", "training", "peak memory")
        for leg in self.legs:
            legs.add_row(
                leg.folder,
                f"{leg.steps:,}",
                f"{leg.passes:.2f}",
                f"{leg.seconds_per_step:.3g} s",
                duration(leg.seconds),
                bytes_of(leg.peak_memory_bytes),
            )
        yield legs
        yield "from a few steps run just now; nothing was written"


def estimate_leg(folder: str, outcome: Outcome, plan: Plan, steps_of_pass: float) -> LegEstimate:
    """Scale a probe up: its first step warms up, the median of the others is the time of a step; evaluations on top."""
    timed = outcome.step_seconds[1:] or outcome.step_seconds
    a_step = statistics.median(timed)
    evaluations = 1 + -(-plan.steps // plan.eval_every)
    seconds = plan.steps * a_step + evaluations * outcome.evaluation_seconds
    return LegEstimate(folder, plan.steps, plan.steps / steps_of_pass, seconds, a_step, outcome.peak_memory_bytes)
