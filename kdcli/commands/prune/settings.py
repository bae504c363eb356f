"""What a recipe of `kdcli prune` may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kdcli.downstream.settings import (
    FinetuneTrainSettings,
    TaskRecipe,
)
from kdcli.recipe.sections import KdSettings, Section


class PruneTrainSettings(FinetuneTrainSettings):
    """`train:` of `prune`: what the paper trains scores with."""

    lr: float = Field(2e-2, gt=0)
    warmup_fraction: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)


class PruneRecipe(TaskRecipe):
    """What `kdcli prune` needs to know.

    `sparsity` is the share of the layers' weights that goes, several are run in turn; `pruner` holds the keys of the
    method's own `Settings`; `drop_rows_below` lets compaction take rows with fewer weights for empty; `cache_gb` is how
    much of the disk may hold what a teacher says, until it is over.
    """

    verb: Literal["prune"] = "prune"
    model: str | None = "bert-base-uncased"
    task: str | None = "sst2"
    method: str = "smp"
    sparsity: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.9], min_length=1)
    teacher: str | None = None
    pruner: dict[str, Any] = Field(default_factory=dict)
    kd: KdSettings = KdSettings()
    drop_rows_below: int = Field(0, ge=0)
    cache_gb: float = Field(8.0, ge=0)
    train: PruneTrainSettings = PruneTrainSettings()


RECIPES: dict[str, type[Section]] = {"prune": PruneRecipe}
"""Folder of `recipes/` and settings model of each kind of recipe of this verb."""
