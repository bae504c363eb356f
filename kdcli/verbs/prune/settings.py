"""The recipe of `kdcli prune`."""

from typing import Annotated, Literal

from pydantic import Field

from kdcli.recipe.methods import known_method, method_names
from kdcli.recipe.options import Option
from kdcli.recipe.sections import KdSettings, LearningRate, RecipeValues, Section
from kdcli.workloads.settings import (
    ENCODER,
    WITH_POOLING,
    WORKLOAD,
    CacheSize,
    DownstreamSettings,
    FinetuneTrainSettings,
    TaskName,
    TaskRecipe,
    VariantSettings,
)

METHODS = tuple(method_names("kdcli.pruners", "pruner"))


class PruneTrainSettings(FinetuneTrainSettings):
    """`train:` of `prune`, with SMP's values. Other methods have another rate and warm-up."""

    lr: LearningRate = Field(
        2e-2,
        description="Peak learning rate; with smp, of the weights' scores (default: the method's).",
    )
    warmup_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the steps in which the learning rate rises; 0.1 for other methods."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW, except for biases and normalisation layers."""


class PruneRecipe(VariantSettings, TaskRecipe):
    """A recipe of `kdcli prune`."""

    verb: Literal["prune"] = "prune"
    model: Annotated[str | None, Option("model", metavar="MODEL", values="model")] = Field(
        "bert-base-uncased", description=ENCODER
    )
    task: TaskName = "sst2"
    method: Annotated[
        str,
        Option(
            "--method",
            kind=list[str],
            metavar="NAME",
            choices=METHODS,
        ),
        known_method(METHODS),
    ] = "smp"
    """Pruning method; may be repeated, one run for each. smp keeps the values of the weights and
    trains a score for each; the others also train the weights."""
    sparsity: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Option("--sparsity", metavar="SHARE")
    ] = Field(default_factory=lambda: [0.9], min_length=1)
    """Share of the layers' weights to remove; may be repeated, one run for each."""
    teacher: Annotated[str | None, Option("--teacher", metavar="MODEL", values="model")] = None
    """Model fine-tuned on the task, whose outputs are also learned (default: none)."""
    pruner: Annotated[
        RecipeValues,
        Option(
            "--masking",
            kind=str,
            key="masking",
            choices=("local", "global", "proportional", "threshold"),
            description="Where weights compete to be kept: local in each matrix, global all "
            "together; proportional keeps more of a matrix with higher scores; threshold keeps "
            "all scores above a number (default: the method's).",
            rare=True,
        ),
    ] = Field(default_factory=dict)
    """Settings of the method."""
    kd: KdSettings = KdSettings()
    drop_rows_below: int = Field(0, ge=0)
    """Minimum number of weights of a row in the compact form."""
    cache_gb: CacheSize = 8.0
    train: PruneTrainSettings = PruneTrainSettings()
    workload: Annotated[RecipeValues, WITH_POOLING] = Field(
        default_factory=dict, description=WORKLOAD
    )
    loss: RecipeValues = Field(default_factory=dict)
    """Settings of the loss of task embedding."""
    eval: DownstreamSettings = DownstreamSettings()


RECIPES: dict[str, type[Section]] = {"prune": PruneRecipe}
"""The recipe's settings model."""
