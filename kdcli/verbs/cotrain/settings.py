"""What a recipe of `kdcli cotrain` may hold."""

from typing import Literal

from pydantic import Field

from kdcli.recipe.sections import (
    BatchSize,
    DataSettings,
    Epochs,
    MeasureSettings,
    Section,
    TrainSettings,
)
from kdcli.workloads.settings import DownstreamSettings, FinetuneTrainSettings, OnTask


class PairSettings(Section):
    """The two models that are trained together, and what they learn from. `weights` are, in order: student against the
    labels, student from teacher, teacher against the labels, teacher from student; `mode` sets some of them to 0.
    `standalone` also trains both without each other, to compare. `dropout` sets every dropout rate of both during
    training; null keeps the models' own."""

    teacher: str | None = None
    student: str | None = None
    base: str | None = None
    mode: Literal["standalone", "one-way", "reversed", "co-distillation"] = "co-distillation"
    weights: list[float] = Field(default_factory=lambda: [1.0, 1.0, 1.0, 4.0])
    temperature: float = Field(1.0, gt=0)
    standalone: bool = True
    dropout: float | None = Field(None, ge=0, lt=1)


class CotrainTrainSettings(TrainSettings):
    """`train:` of `cotrain`, as in the paper's pre-training; `teacher_lr` and `student_lr` null are `lr`."""

    lr: float = Field(5e-4, gt=0)
    teacher_lr: float | None = Field(None, gt=0)
    student_lr: float | None = Field(None, gt=0)
    batch_size: BatchSize = 128
    epochs: Epochs = 10.0


class CommunitySettings(Section):
    """`community:`, a frozen pre-trained model that both models start from and learn from (Community KD).
    `printed_order` takes the divergence from each model to it, as printed in the paper. `layers` are the layers that
    each model copies; null takes evenly spaced ones, and their neighbours for a second model of the same shape."""

    model: str | None = None
    printed_order: bool = False
    layers: list[list[int]] | None = Field(None, min_length=2, max_length=2)


class CotrainRecipe(PairSettings):
    """The recipe of `cotrain` on text; `teacher` and `student` are shapes, hub ids or directories. `base` gives shapes
    a tokenizer and a configuration, but no weights. Without any model, a tokenizer of `vocab_size` words is trained
    from the text."""

    verb: Literal["cotrain"] = "cotrain"
    vocab_size: int = Field(30_522, gt=0, le=10**6)
    community: CommunitySettings = CommunitySettings()
    data: DataSettings = DataSettings()
    train: CotrainTrainSettings = CotrainTrainSettings()
    eval: DownstreamSettings = DownstreamSettings()
    measure: MeasureSettings = MeasureSettings()


class CotrainTaskTrainSettings(FinetuneTrainSettings):
    """`train:` of `cotrain --task`; `teacher_lr` and `student_lr` null are `lr`."""

    teacher_lr: float | None = Field(None, gt=0)
    student_lr: float | None = Field(None, gt=0)


class CotrainTaskRecipe(PairSettings, OnTask):
    """The recipe of `cotrain --task`; `teacher` and `student` are hub ids, directories or shapes. Shapes are copied
    from `base`, or from the teacher if that is null. `keep: best` goes by the student's metric."""

    verb: Literal["cotrain-task"] = "cotrain-task"
    train: CotrainTaskTrainSettings = CotrainTaskTrainSettings()


# Folder of `recipes/` -> settings model.
RECIPES: dict[str, type[Section]] = {"cotrain": CotrainRecipe, "cotrain-task": CotrainTaskRecipe}
