"""What a recipe of `kdcli evaluate` may hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kdcli.downstream.settings import (
    HeadSettings,
    LabelledSettings,
)
from kdcli.recipe.sections import MeasureSettings, Section


class EvaluateRecipe(Section):
    """What `kdcli evaluate` needs to know; the first of `models` is the one the others are compared with. With `masks`
    there is one model, the base of them all, and what is judged is that base under each."""

    verb: Literal["evaluate"] = "evaluate"
    models: list[str] = Field(default_factory=list)
    masks: list[str] = Field(default_factory=list)
    task: str | None = None
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    resamples: int = Field(1000, ge=100)
    worst: int = Field(20, ge=0)
    head: HeadSettings = HeadSettings()
    data: LabelledSettings = LabelledSettings()
    measure: MeasureSettings = MeasureSettings(latency=False)


RECIPES: dict[str, type[Section]] = {"evaluate": EvaluateRecipe}
"""Folder of `recipes/` and settings model of each kind of recipe of this verb."""
