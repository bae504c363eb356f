"""The recipe of `kdcli evaluate`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.options import GOAL, OF_OPTIONS, RUN, Option
from kdcli.recipe.sections import MaxClassDrop, MeasureSettings, Section
from kdcli.workloads.settings import (
    HeadSettings,
    LabelledSettings,
    Metrics,
    Pooling,
    TaskName,
    VectorFormat,
)


class EvaluatedHeadSettings(HeadSettings):
    """`head:` of `evaluate`, including the frozen head of a mask file that holds only bits."""

    kind: Literal["embedding", "mlm"] | None = None
    """Head of a mask file that holds only bits (default: the head that its authors trained
    with)."""
    words: list[str] | None = None
    """Label words of a mask file that holds only bits (default: the authors')."""


class EvaluateRecipe(Section):
    """A recipe of `kdcli evaluate`."""

    verb: Literal["evaluate"] = "evaluate"
    models: Annotated[list[str], Option("models", metavar="MODEL", values="model")] = Field(
        default_factory=list
    )
    """Fine-tuned models, embedding models or exports; the others are compared with the first."""
    masks: Annotated[list[str], Option("--mask", name="mask_file", metavar="FILE")] = Field(
        default_factory=list
    )
    """Mask file of kdcli prune, applied to the model before it is evaluated; may be repeated."""
    task: TaskName = None
    pooling: Pooling = None
    dimensions: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Lengths to which vectors are truncated, each evaluated as a separate model."""
    documents: Annotated[str | None, Option("--documents", metavar="MODEL|FILE", rare=True)] = None
    """In retrieval, search the documents' vectors of this model, or of a .npy file with a row
    for each document (default: each model's own)."""
    vector_formats: list[VectorFormat] = Field(default_factory=list)
    """In retrieval, how the documents' vectors are stored, each evaluated as a separate model."""
    samples_per_label: int = Field(8, ge=1)
    """If vectors are classified: number of training rows of each class that each regression is
    fitted to."""
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"], Option("--dtype", panel=RUN, rare=True)
    ] = "fp32"
    """Number format of the computation."""
    metrics: Metrics = Field(default_factory=list)
    resamples: int = Field(1000, ge=100, le=10**6)
    """Resamples of the bootstrap for intervals."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Level of the intervals of differences."""
    worst: int = Field(20, ge=0)
    """Number of worst examples in the report, and of rows on which a model differs most from the
    baseline (at most 20)."""
    max_class_drop: MaxClassDrop = None
    head: EvaluatedHeadSettings = EvaluatedHeadSettings()
    data: LabelledSettings = LabelledSettings()
    measure: MeasureSettings = MeasureSettings(latency=False)


@dataclass(frozen=True, config=OF_OPTIONS)
class EvaluateOptions:
    """Options of `kdcli evaluate` that are not recipe keys."""

    predictions: Annotated[Path | None, Option("--predictions", metavar="FILE", rare=True)] = None
    """Write every prediction to this jsonl file."""
    submission: Annotated[Path | None, Option("--submission", metavar="DIR", rare=True)] = None
    """Write the GLUE server's files for the test split to this directory."""
    min_metric: Annotated[
        list[str] | None, Option("--min-metric", panel=GOAL, metavar="METRIC=VALUE", rare=True)
    ] = None
    """Exit with 5 if a model scores less; may be repeated."""


RECIPES: dict[str, type[Section]] = {"evaluate": EvaluateRecipe}
"""The settings model of each folder of `recipes/`."""
OPTIONS = {"evaluate": EvaluateOptions}
