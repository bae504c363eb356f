"""What a recipe of `kdcli cotrain` may hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kdcli.downstream.settings import DownstreamSettings, FinetuneTrainSettings, OnTask
from kdcli.recipe.sections import DataSettings, MeasureSettings, Section, TrainSettings


class PairSettings(Section):
    """Where two models trained together come from, and what they learn from.

    `weights` are those of the student against the labels, the student from the teacher, the teacher against the labels
    and the teacher from the student; `mode` sets some of them to 0. `standalone` also trains both without learning from
    each other, to compare. `dropout` sets every dropout rate of both while they train; null leaves their own.
    """

    teacher: str | None = None
    student: str | None = None
    base: str | None = None
    mode: Literal["standalone", "one-way", "reversed", "co-distillation"] = "co-distillation"
    weights: list[float] = Field(default_factory=lambda: [1.0, 1.0, 1.0, 4.0])
    temperature: float = Field(1.0, gt=0)
    standalone: bool = True
    dropout: float | None = Field(None, ge=0, lt=1)


class CotrainTrainSettings(TrainSettings):
    """`train:` of `cotrain`, as the paper pre-trains; `teacher_lr` and `student_lr` null are `lr`."""

    lr: float = Field(5e-4, gt=0)
    teacher_lr: float | None = Field(None, gt=0)
    student_lr: float | None = Field(None, gt=0)
    batch_size: int = Field(128, gt=0)
    epochs: float = Field(10.0, gt=0)


class CommunitySettings(Section):
    """`community:`, a frozen pre-trained model that both models start from and learn from (Community KD).

    `printed_order` takes the divergence from each model to it, and not from it to each model. `layers` are those of it
    that either model is copied from; null takes evenly spaced ones, and their neighbours for a second model of the same
    shape.
    """

    model: str | None = None
    printed_order: bool = False
    layers: list[list[int]] | None = Field(None, min_length=2, max_length=2)


class CotrainRecipe(PairSettings):
    """What `kdcli cotrain` needs to know: `teacher` and `student` are shapes, hub ids or directories.

    `base` gives shapes a tokenizer and a configuration, but no weights. Where nothing else does, a tokenizer of
    `vocab_size` words is trained from the text.
    """

    verb: Literal["cotrain"] = "cotrain"
    vocab_size: int = Field(30_522, gt=0)
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
    """What `kdcli cotrain --task` needs to know: `teacher` and `student` are hub ids or directories, or shapes that are
    copied from `base`, which null is the teacher. `keep: best` goes by the student's metric."""

    verb: Literal["cotrain-task"] = "cotrain-task"
    train: CotrainTaskTrainSettings = CotrainTaskTrainSettings()


RECIPES: dict[str, type[Section]] = {"cotrain": CotrainRecipe, "cotrain-task": CotrainTaskRecipe}
"""Folder of `recipes/` and settings model of each kind of recipe of this verb."""
