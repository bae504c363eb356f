"""What a recipe says about a labelled task: data, head, training; the recipe of `finetune`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kdcli.recipe.sections import MeasureSettings, Section, TrainSettings


class LabelledSettings(Section):
    """`data:` of the verbs that work on a labelled task.

    `source` null is where the task's row says; `train` names another place for the training split (cross-lingual
    tasks); `columns` says what the columns of an own task are; `max_length` null is the task's own; `stride` is the
    overlap of the windows of a long context; `train_rows` and `judged_rows` cut the data to a fixed random choice.
    """

    source: str | None = None
    train: str | None = None
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    max_length: int | None = Field(None, ge=8)
    stride: int = Field(128, ge=0)
    split: Literal["validation", "test"] = "validation"
    train_rows: int | None = Field(None, gt=0)
    judged_rows: int | None = Field(None, gt=0)


class HeadSettings(Section):
    """`head:`; `label_map` is the data's number of each label of a checkpoint whose labels are in another order."""

    label_map: list[int] | None = None


class TaskHeadSettings(HeadSettings):
    """`head:` of the verbs that train on a task.

    `kind` `scratch` is the checkpoint's own head or a new one, trained; `embedding` and `mlm` are frozen heads of label
    words (`kdcli.models.label_words`), null is what the method wants; `words` are one for each label, in their order.
    """

    kind: Literal["scratch", "embedding", "mlm"] | None = None
    words: list[str] | None = None


class FinetuneTrainSettings(TrainSettings):
    """`train:` of `finetune`: the middle of what the papers try on GLUE.

    A micro-batch, 8 rows (16 short ones) unless `micro_batch_size` says otherwise, is a group of similar length; `pool`
    is how many batches are drawn together to form groups from, 1 draws each batch at random.
    """

    lr: float = Field(3e-5, gt=0)
    batch_size: int = Field(32, gt=0)
    warmup_fraction: float = Field(0.1, ge=0, lt=1)
    eval_every: int = Field(500, gt=0)
    pool: int = Field(64, gt=0)


class OnTask(Section):
    """What every verb that trains on a task needs to know.

    `keep` says which weights of a run are the result: the last ones, or those of the best evaluation. `choose_on` names
    the set whose metric chooses among evaluations and runs; null is the mean over all sets.
    """

    task: str | None = None
    keep: Literal["last", "best"] = "last"
    choose_on: str | None = None
    head: TaskHeadSettings = TaskHeadSettings()
    data: LabelledSettings = LabelledSettings()
    train: FinetuneTrainSettings = FinetuneTrainSettings()
    measure: MeasureSettings = MeasureSettings()


class TaskRecipe(OnTask):
    """What every verb that trains one given model on a task needs to know."""

    verb: Literal["finetune", "prune"]
    model: str | None = None


class FinetuneRecipe(TaskRecipe):
    """What `kdcli finetune` needs to know.

    `metrics` are names, scripts or directories of the `evaluate` library, reported beside the task's own metrics.
    `grid` holds recipe keys with a list of values each; every combination is run with `seeds` seeds from `train.seed`
    on.
    """

    verb: Literal["finetune"] = "finetune"
    seeds: int = Field(1, gt=0)
    metrics: list[str] = Field(default_factory=list)
    grid: dict[str, Any] = Field(default_factory=dict)


class DownstreamSettings(Section):
    """`eval:`, the tasks on which a report scores students beside their teacher, each fine-tuned in the same way.

    `source` is a directory with a folder for each task, or the data of the only task; null is where each task's row
    says. `overrides` holds keys of `finetune` to set over the task's own recipe.
    """

    tasks: list[str] = Field(default_factory=list)
    source: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
