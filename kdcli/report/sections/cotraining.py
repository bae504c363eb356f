"""What a report of two models trained together says of where they are from."""

from __future__ import annotations

import re
from collections.abc import Callable

from kdcli.report.schema import Report

COTRAIN = "cotrain"
"""The command whose reports these are."""

SHAPE = re.compile(r"\d+x\d+\S*")


def pair_origin(report: Report) -> str:
    """The model that weights or words were taken from, a frozen teacher first; empty where there was none."""
    recipe = report.recipe
    found = [(recipe.get("community") or {}).get("model"), recipe.get("base"), recipe["teacher"], recipe["student"]]
    return next((str(source) for source in found if source and not SHAPE.fullmatch(str(source))), "")


def pair_title(report: Report, short: Callable[[str], str]) -> str:
    """`6x128 and 3x128, co-distillation`, what they did it on and which frozen model they learned from.

    Args:
        short: a hub id or directory as it is shown.
    """
    recipe = report.recipe
    frozen = (recipe.get("community") or {}).get("model")
    both = f"{short(str(recipe['teacher']))} and {short(str(recipe['student']))}, {recipe['mode']}"
    return both + (f" under {short(str(frozen))}" if frozen else "") + (f" on {_task(report)}" if _task(report) else "")


def pair_made(report: Report, short: Callable[[str], str]) -> str:
    """How one of the models was made; `short` as above."""
    weights = ":".join(f"{weight:g}" for weight in report.recipe["weights"])
    source = (report.recipe.get("data") or {}).get("source")
    text = f" on {short(str(source))}" if source and not _task(report) else ""
    return f"trained together as {pair_title(report, short)}{text}, weights {weights}"


def _task(report: Report) -> str:
    return str(report.recipe.get("task") or "")
