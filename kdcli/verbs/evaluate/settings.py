"""The recipe of `kdcli evaluate`."""

from typing import Annotated, Literal

from pydantic import Field

from kdcli.recipe.sections import MeasureSettings, Section
from kdcli.workloads.settings import HeadSettings, LabelledSettings


class JudgedHeadSettings(HeadSettings):
    """`head:` of `evaluate`. `kind` and `words` are the frozen head of a mask that holds bits alone; null are those
    that the SMP authors trained under."""

    kind: Literal["embedding", "mlm"] | None = None
    words: list[str] | None = None


class EvaluateRecipe(Section):
    """The recipe of `kdcli evaluate`; the first of `models` is the baseline of the others. With `masks` there is one
    model, the base that is evaluated under each mask. `metrics` are names, scripts or directories of the `evaluate`
    library, reported beside the task's own metrics. `pooling` judges plain encoders as embedding models; `dimensions`
    judges vectors cut to their first so many components, each as a model of its own."""

    verb: Literal["evaluate"] = "evaluate"
    models: list[str] = Field(default_factory=list)
    masks: list[str] = Field(default_factory=list)
    task: str | None = None
    pooling: str | None = None
    dimensions: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    metrics: list[str] = Field(default_factory=list)
    resamples: int = Field(1000, ge=100, le=10**6)
    worst: int = Field(20, ge=0)
    head: JudgedHeadSettings = JudgedHeadSettings()
    data: LabelledSettings = LabelledSettings()
    measure: MeasureSettings = MeasureSettings(latency=False)


RECIPES: dict[str, type[Section]] = {
    "evaluate": EvaluateRecipe
}  # Folder of `recipes/` -> settings model
