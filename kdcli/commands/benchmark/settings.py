"""What a recipe of `kdcli benchmark` may hold."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kdcli.downstream.settings import (
    LabelledSettings,
)
from kdcli.recipe.sections import MeasureSettings, Section


class BenchmarkDataSettings(LabelledSettings):
    """`data:` of `benchmark`: text whose lengths `padding: data` draws from, and on which backends are compared; with a
    task, where its examples are."""

    column: str | None = None
    judged_rows: int | None = Field(1000, gt=0)


class BenchmarkRecipe(Section):
    """What `kdcli benchmark` needs to know.

    `models` are hub ids, directories or shapes; `baseline` goes first, else the first of them is it. `preset` gives
    models and cells that are not given here. `backends` are named `BACKEND[-PRECISION]`, such as `onnx-int8`.
    `project` names cards for which times are estimated. With a `task` the models need its head, every backend is judged
    on it too, and is wrong when the task's first metric falls by more than `max_drop` below torch in float32.
    """

    verb: Literal["benchmark"] = "benchmark"
    models: list[str] = Field(default_factory=list)
    baseline: str | None = None
    preset: str | None = None
    backends: list[str] = Field(default_factory=lambda: ["torch"], min_length=1)
    batch_sizes: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    seq_lens: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    padding: Literal["full", "random", "data"] = "full"
    project: list[str] = Field(default_factory=list)
    task: str | None = None
    max_drop: float = Field(0.02, ge=0)
    data: BenchmarkDataSettings = BenchmarkDataSettings()
    measure: MeasureSettings = MeasureSettings()


RECIPES: dict[str, type[Section]] = {"benchmark": BenchmarkRecipe}
"""Folder of `recipes/` and settings model of each kind of recipe of this verb."""
