"""The recipe of `kdcli benchmark`."""

from typing import Annotated, Literal

from pydantic import Field

from kdcli.recipe.sections import BatchSize, MeasureSettings, Section
from kdcli.workloads.settings import LabelledSettings


class BenchmarkDataSettings(LabelledSettings):
    """`data:` of `benchmark`: the task's examples, else text for `padding: data` and for the comparison of backends."""

    column: str | None = None
    judged_rows: int | None = Field(1000, gt=0)


class BenchmarkRecipe(Section):
    """The recipe of `kdcli benchmark`. `models` are hub ids, directories or shapes; the baseline is `baseline`, else
    the first. `preset` supplies missing models and cells; with neither, it is `papers`. `backends` are named
    `BACKEND[-PRECISION]`, such as `onnx-int8`; `dtype` is the precision of the baseline and of those without one.
    With a `task` the models need its head; a backend fails if the task's first metric drops by more than `max_drop`
    below torch in float32."""

    verb: Literal["benchmark"] = "benchmark"
    models: list[str] = Field(default_factory=list)
    baseline: str | None = None
    preset: str | None = None
    backends: list[str] = Field(default_factory=lambda: ["torch"], min_length=1)
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    batch_sizes: list[BatchSize] = Field(default_factory=list)
    seq_lens: list[Annotated[int, Field(gt=0, le=2**20)]] = Field(default_factory=list)
    padding: Literal["full", "random", "data"] = "full"
    task: str | None = None
    max_drop: float = Field(0.02, ge=0)
    data: BenchmarkDataSettings = BenchmarkDataSettings()
    measure: MeasureSettings = MeasureSettings()


RECIPES: dict[str, type[Section]] = {
    "benchmark": BenchmarkRecipe
}  # Folder of `recipes/` -> settings model
