"""The recipe of `kdcli prune`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kdcli.recipe.sections import KdSettings, Section
from kdcli.workloads.settings import (
    DownstreamSettings,
    FinetuneTrainSettings,
    TaskRecipe,
    VectorSettings,
)


class PruneTrainSettings(FinetuneTrainSettings):
    """`train:` of `prune`: SMP's learning rate of scores, no warm-up and no decay; other methods have their
    own rate and warm-up (`kdcli.pruners.pruner.Defaults`)."""

    lr: float = Field(2e-2, gt=0)
    warmup_fraction: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)


class PruneRecipe(TaskRecipe):
    """All keys of a `prune` recipe. `sparsity` is the share of the layers' weights to remove; each value is a run.
    `pruner` holds the keys of the method's own `Settings`. `drop_rows_below` makes compaction drop rows with fewer
    weights. `cache_gb` is the disk budget for cached teacher signals, deleted at the end of the run. `embedding`,
    `loss` and `eval` are of task `embedding`, which learns an embedding model's own vectors."""

    verb: Literal["prune"] = "prune"
    model: str | None = "bert-base-uncased"
    task: str | None = "sst2"
    method: str = "smp"
    sparsity: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default_factory=lambda: [0.9], min_length=1
    )
    teacher: str | None = None
    pruner: dict[str, Any] = Field(default_factory=dict)
    kd: KdSettings = KdSettings()
    drop_rows_below: int = Field(0, ge=0)
    cache_gb: float = Field(8.0, ge=0)
    train: PruneTrainSettings = PruneTrainSettings()
    embedding: VectorSettings = VectorSettings()
    loss: dict[str, Any] = Field(default_factory=dict)
    eval: DownstreamSettings = DownstreamSettings()


RECIPES: dict[str, type[Section]] = {"prune": PruneRecipe}  # Folder of `recipes/` -> settings model
