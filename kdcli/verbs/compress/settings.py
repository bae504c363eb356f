"""The recipe of `kdcli compress`."""

from typing import Any, Literal

from pydantic import Field

from kdcli.recipe.sections import MeasureSettings, Section
from kdcli.workloads.settings import LabelledSettings


class GoalSettings(Section):
    """`goal:`. `max_drop` is what the task's first metric may lose, in points of 0.01; the other three are of one
    sequence of 128 tokens, beside torch in float32, and of the files that are shipped. `strict`: the lower end of the
    interval must keep `max_drop` too."""

    max_drop: float | None = Field(None, ge=0)
    speedup: float | None = Field(None, gt=1)
    max_latency_ms: float | None = Field(None, gt=0)
    max_mb: float | None = Field(None, gt=0)
    strict: bool = False


class PlanSettings(Section):
    """`plan:`, what is tried where the recipe lists no steps. `shapes` empty are taken from the model. `finetune`,
    `distill` and `prune` hold keys of those verbs' recipes; `prune` null leaves pruning out. `trim_from` is the share
    of the embeddings among the parameters from which the vocabulary is trimmed too. `undistilled` trains the last shape
    without its teacher as well."""

    backends: list[str] = Field(
        default_factory=lambda: ["onnx-int8", "openvino-int8", "onnx"], min_length=1
    )
    shapes: list[str] = Field(default_factory=list)
    finetune: dict[str, Any] = Field(default_factory=dict)
    distill: dict[str, Any] = Field(default_factory=dict)
    prune: dict[str, Any] | None = Field(default_factory=dict)
    trim_from: float = Field(0.25, ge=0, le=1)
    undistilled: bool = True


class CompressRecipe(Section):
    """The recipe of `kdcli compress`. `steps` make a pipeline, each a mapping from `distill`, `prune`, `trim`,
    `quantize` or `export` to keys of its own; without them candidates are planned. `text` is what an embedding model is
    distilled on; `pooling` makes a plain encoder one. `budget` is in seconds."""

    verb: Literal["compress"] = "compress"
    model: str | None = None
    task: str | None = None
    text: str | None = None
    pooling: str | None = None
    budget: float | None = Field(None, gt=0)
    goal: GoalSettings = GoalSettings()
    steps: list[dict[str, dict[str, Any]]] = Field(default_factory=list)
    plan: PlanSettings = PlanSettings()
    data: LabelledSettings = LabelledSettings()
    seed: int = Field(0, ge=0, lt=2**63)
    measure: MeasureSettings = MeasureSettings(min_runs=30, min_seconds=3.0)

    @property
    def trimmed_to(self) -> str | None:
        """The text whose tokens a trimmed model keeps: what an embedding model learns, else the judged data."""
        return self.text or self.data.source


RECIPES: dict[str, type[Section]] = {
    "compress": CompressRecipe
}  # Folder of `recipes/` -> settings model
