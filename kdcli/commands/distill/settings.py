"""What a recipe of `kdcli distill` may hold."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kdcli.downstream.settings import (
    DownstreamSettings,
    OnTask,
)
from kdcli.recipe.sections import DataSettings, KdSettings, MeasureSettings, Section, TrainSettings


class StudentSettings(Section):
    """`student:` of `distill`.

    `layers` names the teacher layers to copy; null means evenly spaced. `dropout` sets every dropout rate of the
    student while it is distilled; null leaves the teacher's.
    """

    to: list[str] = Field(default_factory=list)
    init: Literal["teacher", "random"] = "teacher"
    layers: list[int] | None = None
    dropout: float | None = Field(None, ge=0, lt=1)


class DistillRecipe(Section):
    """What `kdcli distill` needs to know. `loss` holds the keys of the method's own `Settings`."""

    verb: Literal["distill"] = "distill"
    teacher: str | None = None
    method: str = "minilm"
    assistant: str = "auto"
    student: StudentSettings = StudentSettings()
    loss: dict[str, Any] = Field(default_factory=dict)
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    eval: DownstreamSettings = DownstreamSettings()
    measure: MeasureSettings = MeasureSettings()


class TaskStudentSettings(StudentSettings):
    """`student:` of a task's distillation; `source` is an encoder to start from in place of a copy of the teacher."""

    source: str | None = None


class GeneralSettings(Section):
    """`general:`, the stage on text before a task's own: a `distill` of its own, whose student the task starts from.

    `recipe` and `overrides` say what that run is; `teacher` null is the task's teacher, `source` null the recipe's
    text. `run` is its directory, made where it is not there, gone on with where it is not done, else used as it is;
    null is `general/` of the output directory.
    """

    use: bool = False
    recipe: str | None = None
    teacher: str | None = None
    source: str | None = None
    run: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)


class AugmentSettings(Section):
    """`augment:`, the copies of the training examples with other words (TinyBERT, algorithm 1).

    `model` is a masked language model, null the teacher where it is one; `glove` is a file of word vectors, null means
    the teacher's own embeddings. `predict` says whether the prediction stage reads the copies too.
    """

    use: bool = False
    copies: int = Field(20, gt=0)
    probability: float = Field(0.4, gt=0, le=1)
    candidates: int = Field(15, gt=0)
    model: str | None = None
    glove: str | None = None
    predict: bool = True


class UndistilledSettings(Section):
    """`undistilled:`, the same student fine-tuned without a teacher: as the task's own recipe of `finetune` says, with
    the overrides."""

    use: bool = True
    overrides: dict[str, Any] = Field(default_factory=dict)


class TaskDistillRecipe(OnTask):
    """What `kdcli distill --task` needs to know.

    `loss` holds the keys of the method's own `Settings`. Its `stage` is trained before the prediction stage
    (`separate`), added to that stage's loss (`joint`), or left out (`none`); null is what the method wants. `train` is
    of the prediction stage, `intermediate` what the separate stage has other than that. `more_teachers` are asked
    beside `teacher` in the prediction stage, with equal weight. `cache_gb` is how much of the disk a stage may take to
    keep the teacher's signals, 0 keeps none.
    """

    verb: Literal["distill-task"] = "distill-task"
    teacher: str | None = None
    more_teachers: list[str] = Field(default_factory=list)
    method: str = "tinybert"
    stage: Literal["separate", "joint", "none"] | None = None
    student: TaskStudentSettings = TaskStudentSettings()
    loss: dict[str, Any] = Field(default_factory=dict)
    kd: KdSettings = KdSettings()
    general: GeneralSettings = GeneralSettings()
    augment: AugmentSettings = AugmentSettings()
    intermediate: dict[str, Any] = Field(default_factory=lambda: {"lr": 5e-5, "epochs": 20.0})
    undistilled: UndistilledSettings = UndistilledSettings()
    cache_gb: float = Field(8.0, ge=0)


RECIPES: dict[str, type[Section]] = {"distill": DistillRecipe, "distill-task": TaskDistillRecipe}
"""Folder of `recipes/` and settings model of each kind of recipe of this verb."""
