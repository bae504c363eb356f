"""The settings of every verb: what its recipe may hold, with types, limits and defaults. No torch, no logic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of every section of a recipe: unknown keys and values of another type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TrainSettings(Section):
    """`train:`, shared by every verb that trains. `batch_size` is global: over all devices and micro-batches."""

    lr: float = Field(3e-4, gt=0)
    max_steps: int | None = Field(None, gt=0)
    epochs: float = Field(3.0, gt=0)
    batch_size: int = Field(256, gt=0)
    micro_batch_size: int | None = Field(None, gt=0)
    warmup_steps: int | None = Field(None, ge=0)
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    beta2: float = Field(0.999, gt=0, lt=1)
    clip: float = Field(1.0, gt=0)
    seed: int = Field(0, ge=0)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    checkpoint_every: int = Field(500, gt=0)
    log_every: int = Field(10, gt=0)
    eval_every: int = Field(250, gt=0)


class MaskSettings(Section):
    """`data.mask:`, which tokens of a text a masked language model has to guess: `share` of each row's, whole words or
    pieces, anew in every pass or `static`."""

    share: float = 0.15
    whole_words: bool = False
    static: bool = False


class DataSettings(Section):
    """`data:` of the verbs that read text; `mask` is looked at by methods that mask it."""

    source: str = "Salesforce/wikitext:wikitext-103-raw-v1"
    max_length: int = Field(128, ge=8)
    column: str | None = None
    pack_isolated: bool = False
    held_out_blocks: int = Field(256, gt=0)
    mask: MaskSettings = MaskSettings()


class StudentSettings(Section):
    """`student:` of `distill`.

    `layers` names the teacher layers to copy; null means evenly spaced. `dropout` sets every dropout rate of the
    student while it is distilled; null leaves the teacher's.
    """

    to: list[str] = Field(default_factory=list)
    init: Literal["teacher", "random"] = "teacher"
    layers: list[int] | None = None
    dropout: float | None = Field(None, ge=0, lt=1)


class MeasureSettings(Section):
    """`measure:`, the latency part of a report: every cell goes on until both minima are reached."""

    latency: bool = True
    min_runs: int = Field(50, gt=0)
    min_seconds: float = Field(5.0, ge=0)


class DownstreamSettings(Section):
    """`eval:`, the tasks on which a report scores students beside their teacher, each fine-tuned in the same way.

    `source` is a directory with a folder for each task, or the data of the only task; null is where each task's row
    says. `overrides` holds keys of `finetune` to set over the task's own recipe.
    """

    tasks: list[str] = Field(default_factory=list)
    source: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Invocation:
    """What the command line adds to a recipe: where and how to run, nothing that says what comes out."""

    arguments: tuple[str, ...] = ()
    output_dir: Path | None = None
    device: str = "auto"
    processes: int | None = None
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    report_to: str = "none"
    trust_remote_code: bool = False


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

    `grid` holds recipe keys with a list of values each; every combination is run with `seeds` seeds from `train.seed`
    on.
    """

    verb: Literal["finetune"] = "finetune"
    seeds: int = Field(1, gt=0)
    grid: dict[str, Any] = Field(default_factory=dict)


class PruneTrainSettings(FinetuneTrainSettings):
    """`train:` of `prune`: what the paper trains scores with."""

    lr: float = Field(2e-2, gt=0)
    warmup_fraction: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)


class KdSettings(Section):
    """`kd:`, the loss against a teacher: `weight`·T²·KL(teacher ‖ model) at temperature T, the rest against labels."""

    weight: float = Field(0.5, ge=0, le=1)
    temperature: float = Field(2.0, gt=0)


class PruneRecipe(TaskRecipe):
    """What `kdcli prune` needs to know.

    `sparsity` is the share of the layers' weights that goes, several are run in turn; `pruner` holds the keys of the
    method's own `Settings`; `drop_rows_below` lets compaction take rows with fewer weights for empty; `cache_gb` is how
    much of the disk may hold what a teacher says, until it is over.
    """

    verb: Literal["prune"] = "prune"
    model: str | None = "bert-base-uncased"
    task: str | None = "sst2"
    method: str = "smp"
    sparsity: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.9], min_length=1)
    teacher: str | None = None
    pruner: dict[str, Any] = Field(default_factory=dict)
    kd: KdSettings = KdSettings()
    drop_rows_below: int = Field(0, ge=0)
    cache_gb: float = Field(8.0, ge=0)
    train: PruneTrainSettings = PruneTrainSettings()


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


class EvaluateRecipe(Section):
    """What `kdcli evaluate` needs to know; the first of `models` is the one the others are compared with. With `masks`
    there is one model, the base of them all, and what is judged is that base under each."""

    verb: Literal["evaluate"] = "evaluate"
    models: list[str] = Field(default_factory=list)
    masks: list[str] = Field(default_factory=list)
    task: str | None = None
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    resamples: int = Field(1000, ge=100)
    worst: int = Field(20, ge=0)
    head: HeadSettings = HeadSettings()
    data: LabelledSettings = LabelledSettings()
    measure: MeasureSettings = MeasureSettings(latency=False)


class BenchmarkDataSettings(LabelledSettings):
    """`data:` of `benchmark`: text whose lengths `padding: data` draws from, and on which backends are compared; with a
    task, where its examples are."""

    column: str | None = None
    judged_rows: int | None = Field(1000, gt=0)


class BenchmarkRecipe(Section):
    """What `kdcli benchmark` needs to know.

    `models` are hub ids, directories or shapes; `baseline` goes first, else the first of them is it. `preset` gives
    models and cells that are not given here. `backends` are named `BACKEND[-PRECISION]`, such as `onnx-int8`.
    `project` names cards for which times are estimated. With a `task` the models need its head, every backend is judged
    on it too, and is wrong when the task's first metric falls by more than `max_drop` below torch in float32.
    """

    verb: Literal["benchmark"] = "benchmark"
    models: list[str] = Field(default_factory=list)
    baseline: str | None = None
    preset: str | None = None
    backends: list[str] = Field(default_factory=lambda: ["torch"], min_length=1)
    batch_sizes: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    seq_lens: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    padding: Literal["full", "random", "data"] = "full"
    project: list[str] = Field(default_factory=list)
    task: str | None = None
    max_drop: float = Field(0.02, ge=0)
    data: BenchmarkDataSettings = BenchmarkDataSettings()
    measure: MeasureSettings = MeasureSettings()


VERBS: dict[str, type[Section]] = {
    "distill": DistillRecipe,
    "distill-task": TaskDistillRecipe,
    "finetune": FinetuneRecipe,
    "prune": PruneRecipe,
    "cotrain": CotrainRecipe,
    "cotrain-task": CotrainTaskRecipe,
    "evaluate": EvaluateRecipe,
    "benchmark": BenchmarkRecipe,
}
"""Settings model of each verb that takes recipes."""
