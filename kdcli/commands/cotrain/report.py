"""What a co-training on text reports: both models, what each gained from the other, which of two students is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdcli.bench.latency import Latency
from kdcli.commands.cotrain.plan import STANDALONE
from kdcli.commands.cotrain.settings import CotrainRecipe
from kdcli.losses.ctcd import TEACHER
from kdcli.report.finish import RunResult, write_report
from kdcli.training.run_dir import RunDir
from kdcli.types import Outcome

HELD_OUT = "held-out MLM loss"
"""Name of the quality row that holds the loss against masked tokens of text never trained on."""


@dataclass(frozen=True)
class Trained:
    """Two models, saved, what their training took, and their held-out loss against the labels before and after."""

    cards: dict[str, dict[str, Any]]
    folders: dict[str, Path]
    outcome: Outcome
    losses: dict[str, tuple[float, float]]


def quality_of_pair(trained: Trained) -> dict[str, dict[str, dict[str, float]]]:
    """The held-out loss of both as `quality` of a report."""
    return {HELD_OUT: {name: {"loss": after} for name, (_, after) in trained.losses.items()}}


def gains(trained: Trained, losses: Mapping[str, Mapping[str, float]], compared: bool) -> list[str]:
    """What each model gained from the other, and of two students the better one."""
    lines = []
    for name, (before, after) in trained.losses.items():
        line = f"{name}: {HELD_OUT} {before:.4f} before, {after:.4f} after"
        if compared:
            other = losses[f"{name} {STANDALONE}"]["loss"]
            word = "better" if after < other else "worse"
            line += f", {other:.4f} {STANDALONE}: {abs(other - after):.4f} {word} with the other model"
        lines.append(line)
    if TEACHER not in trained.losses:
        best, worse = sorted(trained.losses, key=lambda name: trained.losses[name][1])
        of_both = f"{trained.losses[best][1]:.4f} against {trained.losses[worse][1]:.4f}"
        lines.append(f"{best} is the better student: {HELD_OUT} {of_both}")
    return lines


def finished(
    folder: Path,
    recipe: CotrainRecipe,
    trained: Trained,
    *,
    cards: Mapping[str, Mapping[str, Any]],
    quality: Mapping[str, Mapping[str, Mapping[str, float]]],
    notes: list[str],
    latency: Latency | None = None,
    scores: list[dict[str, Any]] | None = None,
    alone: RunResult | None = None,
) -> RunResult:
    """Write the report of a pair that was trained and saved; `alone` is the run of the same two without each other, the
    rest is as of `kdcli.report.finish.finish`."""
    return write_report(
        RunDir(folder),
        command="cotrain",
        recipe=recipe.model_dump(),
        cards=cards,
        folders=trained.folders,
        latency=latency or Latency(),
        outcome=trained.outcome,
        quality=quality,
        notes=notes,
        auto_class="AutoModelForMaskedLM",
        evaluations=scores or (),
        beside={STANDALONE: alone} if alone is not None else None,
    )
