"""Keys of a recipe of `kdcli distill`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kdcli.recipe.sections import (
    DataSettings,
    Init,
    KdSettings,
    MeasureSettings,
    Section,
    TrainSettings,
)
from kdcli.workloads.settings import (
    DownstreamSettings,
    OnTask,
    RerankRecipe,
    VectorSettings,
)


class StudentSettings(Section):
    """`student:` of `distill`. `layers` are the teacher layers to copy, null evenly spaced ones; `dropout` sets every
    dropout rate while training. `source` is an encoder to start from in the teacher's place (`method: embedding`, or on
    a task), which `to` makes smaller."""

    to: list[str] = Field(default_factory=list)
    init: Init = "teacher"
    layers: list[int] | None = None
    dropout: float | None = Field(None, ge=0, lt=1)
    source: str | None = None


class RelationSettings(Section):
    """`relation:`, what computes relations of self-attention: PyTorch, kernels in Triton on a CUDA device, or `auto`,
    Triton where it is installed and the card has compute capability 8.0."""

    kernel: Literal["auto", "torch", "triton"] = "auto"


class EmbeddingSettings(VectorSettings):
    """`embedding:`, of `method: embedding`. `dense`: a student narrower than its teacher's vectors gets a dense layer
    up to their width; otherwise it learns their principal components. `vectors` is a file of the teacher's vectors,
    null computes them."""

    dense: bool = False
    vectors: str | None = None


class OnTextDownstream(DownstreamSettings):
    """`eval:` of `distill` on text. After the steps of `at` the students are scored too."""

    at: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)


class DistillRecipe(Section):
    """A recipe of `kdcli distill` on text; `loss` holds the keys of the method's `Settings`. `variants`: name -> the
    keys of `method`, `assistant` and `loss` it changes; each trains students of its own in the teacher's one pass."""

    verb: Literal["distill"] = "distill"
    teacher: str | None = None
    method: str = "minilm"
    assistant: str = "auto"
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    student: StudentSettings = StudentSettings()
    loss: dict[str, Any] = Field(default_factory=dict)
    relation: RelationSettings = RelationSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    eval: OnTextDownstream = OnTextDownstream()
    measure: MeasureSettings = MeasureSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()


class GeneralSettings(Section):
    """`general:`, a run of `distill` on text whose student the task starts from. `teacher` null is the task's teacher,
    `source` null the recipe's text. `run` is its directory, used as it is if the run is done; null is `general/` of the
    output directory."""

    use: bool = False
    recipe: str | None = None
    teacher: str | None = None
    source: str | None = None
    run: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)


class AugmentSettings(Section):
    """`augment:`, copies of the training examples with other words (TinyBERT, algorithm 1). `model` is a masked
    language model, null none; `glove` a file of word vectors, null the teacher's embeddings. `predict`: the prediction
    stage reads the copies too."""

    use: bool = False
    copies: int = Field(20, gt=0, le=10**4)
    probability: float = Field(0.4, gt=0, le=1)
    candidates: int = Field(15, gt=0, le=10**4)
    model: str | None = None
    glove: str | None = None
    predict: bool = True


class UndistilledSettings(Section):
    """`undistilled:`, the same student fine-tuned without a teacher by the task's recipe of `finetune`."""

    use: bool = True
    overrides: dict[str, Any] = Field(default_factory=dict)


class TaskDistillRecipe(OnTask):
    """A recipe of `kdcli distill --task`; `loss` holds the keys of the method's `Settings`. The method's objective is
    trained before the prediction stage (`stage: separate`), added to its loss (`joint`), or left out (`none`); null is
    the method's default. `soft_labels` is a file of probabilities or scores in the teacher's place. `train` is of the
    prediction stage; `intermediate` overrides it for the separate stage. `more_teachers` teach the prediction stage
    too, with equal weight. `cache_gb` is the disk budget in GB for cached teacher signals, deleted at the end of the
    run."""

    verb: Literal["distill-task"] = "distill-task"
    teacher: str | None = None
    more_teachers: list[str] = Field(default_factory=list)
    soft_labels: str | None = None
    method: str = "tinybert"
    stage: Literal["separate", "joint", "none"] | None = None
    student: StudentSettings = StudentSettings()
    loss: dict[str, Any] = Field(default_factory=dict)
    relation: RelationSettings = RelationSettings()
    kd: KdSettings = KdSettings()
    general: GeneralSettings = GeneralSettings()
    augment: AugmentSettings = AugmentSettings()
    intermediate: dict[str, Any] = Field(default_factory=lambda: {"lr": 5e-5, "epochs": 20.0})
    undistilled: UndistilledSettings = UndistilledSettings()
    cache_gb: float = Field(8.0, ge=0)


RECIPES: dict[str, type[Section]] = {
    "distill": DistillRecipe,
    "distill-task": TaskDistillRecipe,
    "rerank": RerankRecipe,
}
"""Folder of `recipes/` -> its recipes' model."""
