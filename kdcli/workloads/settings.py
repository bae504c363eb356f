"""Recipe sections for labelled data, and the recipe of `finetune`."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field

from kdcli.data.labelled.request import RowsRequest
from kdcli.deploy.backends import BackendName
from kdcli.errors import UsageError
from kdcli.recipe.options import DATA, TRAINING, Option
from kdcli.recipe.sections import (
    DATA_OPTION,
    STEPS,
    BatchSize,
    EvalTasks,
    GlobalBatch,
    Init,
    LearningRate,
    Length,
    MaskSettings,
    MeasureSettings,
    PartitionFile,
    RecipeValues,
    Section,
    TrainSettings,
)

ENCODER = "Encoder: a hub id, a directory, 'demo' or 'demo-classifier'."
SHAPE = (
    "Layers x width of the student, such as 6x768, or static:256; may be repeated. Or a goal, 2x "
    "or 5ms: the best student that is fast enough on 128 tokens. Or family, or 6x384,3x384: one "
    "training of students that share their layers."
)
TEACHER = "Teacher: a hub id, a directory, 'demo' or 'demo-classifier'."
START = (
    "Encoder that the student starts from; on text, only with method embedding "
    "(default: the teacher)."
)
TASK_OPTION = Option("--task", panel=DATA, metavar="TASK", values="task")
TASK = "Task: sst2, mnli, squad ..., or 'own' for your own files."
TaskName = Annotated[str | None, TASK_OPTION, Field(description=TASK)]
POOLING = "Pooling of an embedding model without modules.json (default: the model's own)."
PoolingName = Literal["mean", "cls", "last"]
Pooling = Annotated[
    PoolingName | None,
    Option("--pooling", panel=DATA, metavar="NAME"),
    Field(description=POOLING),
]
WITH_POOLING = Option(
    "--pooling",
    panel=DATA,
    metavar="NAME",
    kind=str,
    key="pooling",
    choices=get_args(PoolingName),
    description=POOLING,
)
"""`--pooling` as a key of the `workload` section."""
WORKLOAD = "Settings of the task's kind of data."
VectorFormat = Literal["float32", "int8", "binary"]
"""How the vectors of documents are stored for a search."""
Metrics = Annotated[
    list[str],
    Option("--metric", panel=DATA, metavar="NAME|DIR", rare=True),
    Field(
        description="Additional metric of the evaluate library: a name, script or directory; "
        "may be repeated.",
    ),
]
Labels = Annotated[
    Literal["data", "teacher"] | None,
    Field(
        description="Source of labels: the data, or only the teacher's outputs, in which case "
        "scores measure agreement with the teacher (default: the data if they have labels).",
    ),
]
LabelMap = Annotated[
    list[int] | None,
    Field(
        description="Number of each checkpoint label in the data (default: the same order).",
    ),
]
CacheSize = Annotated[
    float,
    Field(ge=0, description="Disk budget for cached teacher signals, in GB; 0 disables the cache."),
]
Keep = Annotated[
    Literal["last", "best"],
    Field(description="Weights to keep: from the last step, or from the best evaluation."),
]


TextShare = Annotated[
    float,
    Field(gt=0, le=1, description="Share of the training rows of a text that is read."),
]
LABELLED_DATA_OPTION = DATA_OPTION.of(
    "finetune",
    "Data of the task: a hub id (or ID@REV), a file, a directory, or 'demo' (default: the task's "
    "own).",
)
"""Replaces `--data` of a verb that needs labels."""


class LabelledSettings(Section):
    """The `data` section of verbs that work on a labelled task."""

    source: Annotated[str | None, DATA_OPTION, LABELLED_DATA_OPTION] = None
    """Texts or rows of a task, with or without labels: a hub id (or ID@REV), a file, a
    directory, or 'demo' (default: the task's own data)."""
    train: str | None = None
    """Another source of the training split, for a task in several languages (default: the same
    source)."""
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    """Column for each role in your own data, such as text."""
    max_length: Length | None = None
    """Maximum number of tokens per row or window (default: the task's)."""
    stride: int = Field(128, ge=0)
    """Number of tokens shared by consecutive windows of a long context."""
    split: Literal["validation", "test", "verification"] = "validation"
    """Split on which models are evaluated."""
    partition: PartitionFile = None
    split_seed: int = Field(0, ge=0, lt=2**63)
    """Seed that selects the held-out rows if there is no validation split."""
    train_rows: int | None = Field(None, gt=0)
    """Number of training rows, a fixed selection (default: all)."""
    judged_rows: int | None = Field(None, gt=0)
    """Number of evaluation rows, a fixed selection (default: all)."""
    skip_bad: bool = False
    """Whether to skip invalid rows instead of stopping with an error."""
    judge_trained_rows: bool = False
    """Whether to keep evaluation rows that a model was trained on."""
    labels: Labels = None

    def refuse_choices(self, rows: str, *, allowed: Collection[str] = ()) -> None:
        """Raise a UsageError if a key chooses among rows that are all read.

        Args:
            rows: The name of the rows that are read, for the message.
            allowed: The keys that these rows have.
        """
        keys = {"columns", "train", "train_rows", "judged_rows", "skip_bad"} - set(allowed)
        fields = type(self).model_fields
        unread = [
            f"data.{key}"
            for key in sorted(keys)
            if getattr(self, key) != fields[key].get_default(call_default_factory=True)
        ]
        if unread:
            raise UsageError(
                f"{', '.join(unread)}: {rows} have no such choice", f"remove {', '.join(unread)}"
            )

    def rows_request(self, task: str) -> RowsRequest:
        """Return the request for the rows of a task."""
        return RowsRequest(
            task,
            source=self.source,
            train_source=self.train,
            columns=self.columns,
            split=self.split,
            split_seed=self.split_seed,
            partition=self.partition,
            train_rows=self.train_rows,
            judged_rows=self.judged_rows,
            skip_bad=self.skip_bad,
            judge_trained_rows=self.judge_trained_rows,
        )


class TrainingData(LabelledSettings):
    """The `data` section of verbs that train on text or on a task."""

    source: Annotated[str | None, DATA_OPTION] = None
    """Text, or rows of a task: a hub id (or ID@REV), a file, a directory, a URL or 'demo'
    (default: WikiText-103, or the task's own data)."""
    column: str | None = None
    """Column of the text (default: 'text', 'body' ..., or the only column of strings)."""
    share: TextShare = 1.0
    pack_isolated: bool = False
    """Whether documents in one row ignore each other."""
    held_out_blocks: int = Field(256, gt=0)
    """Rows of text that are held out to evaluate during training."""
    mask: MaskSettings = MaskSettings()

    @property
    def text(self) -> str:
        """The source of the text."""
        assert self.source is not None, "text has a default source"
        return self.source

    @property
    def block_length(self) -> int:
        """The number of tokens in a row of text."""
        assert self.max_length is not None, "text has a default length"
        return self.max_length


TEXT_DATA: Mapping[str, object] = {
    "data.source": "Salesforce/wikitext:wikitext-103-raw-v1",
    "data.max_length": 128,
}
TEXT_TRAINING: Mapping[str, object] = {
    "train.lr": 3e-4,
    "train.batch_size": 256,
    "train.warmup_fraction": 0.05,
    "train.eval_every": 250,
}
"""Defaults of a training on text, by recipe key."""
TEXT_KEYS = (
    "data.column",
    "data.share",
    "data.pack_isolated",
    "data.held_out_blocks",
    "data.mask",
    "eval",
)
"""Keys and sections of a recipe that only a training on text reads."""
TASK_KEYS = (
    "keep",
    "choose_on",
    "head",
    "data.train",
    "data.columns",
    "data.stride",
    "data.split",
    "data.split_seed",
    "data.train_rows",
    "data.judged_rows",
    "data.skip_bad",
    "data.judge_trained_rows",
    "data.labels",
    "train.pool",
)
"""Keys and sections of a recipe that only a training on a task reads."""


class HeadSettings(Section):
    """The `head` section."""

    label_map: LabelMap = None


class TaskHeadSettings(HeadSettings):
    """The `head` section of verbs that train on a task."""

    kind: Literal["scratch", "embedding", "mlm"] | None = None
    """Head: the checkpoint's own or a new one (scratch), or a frozen head of label words
    (default: depends on the method)."""
    words: list[str] | None = None
    """Label words, one per label, in label order (default: the task's)."""


class FinetuneTrainSettings(TrainSettings):
    """The `train` section of `finetune`. The defaults are typical values from papers on GLUE."""

    lr: LearningRate = 3e-5
    batch_size: GlobalBatch = 32
    micro_batch_size: BatchSize | None = None
    """Rows that a device processes at once (default: a group of 8 rows of similar length, or of
    16 if rows are short). It does not change which rows share a batch."""
    warmup_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the steps that are warm-up."""
    eval_every: int = Field(500, gt=0)
    """Number of steps between evaluations."""
    pool: int = Field(64, gt=0, le=10**4)
    """Number of batches drawn together and sorted by length; 1 for random batches."""


StepsOrNone = Annotated[
    int | None, Option("--max-steps", panel=TRAINING), Field(ge=0, description=STEPS)
]
"""The number of steps of a student. With 0, it stays as it was fitted to its teacher."""


class OnTask(Section):
    """The recipe sections of all verbs that train on a task."""

    task: TaskName = None
    keep: Keep = "last"
    choose_on: str | None = None
    """Evaluation set that decides which weights and runs are best (default: the mean over all
    sets)."""
    workload: RecipeValues = Field(default_factory=dict, description=WORKLOAD)
    head: TaskHeadSettings = TaskHeadSettings()
    data: LabelledSettings = LabelledSettings()
    train: FinetuneTrainSettings = FinetuneTrainSettings()
    measure: MeasureSettings = MeasureSettings()


class VariantSettings(Section):
    """Keys that run a verb several times and compare the runs."""

    ablate: Annotated[str | None, Option("--ablate", metavar="NAME", rare=True)] = None
    """List of variants to train and compare in one table."""
    seeds: Annotated[int, Option("--seeds", rare=True)] = Field(1, gt=0, le=1_000)
    """Number of runs per variant, each with its own seed."""


class TaskRecipe(OnTask):
    """The recipe of a verb that trains one model on a task."""

    verb: Literal["finetune", "prune"]
    model: Annotated[str | None, Option("model", metavar="MODEL", values="model")] = Field(
        None, description=ENCODER
    )


class SmallerSettings(Section):
    """The `student` section of `finetune`, for a model that is made smaller first."""

    to: str | None = None
    """Shape, such as 6x768 (default: the model's)."""
    init: Init = "teacher"
    """How the weights of a smaller model start."""
    layers: list[int] | None = None
    """Layers of the model to copy (default: evenly spaced)."""


class FinetuneRecipe(TaskRecipe):
    """The recipe of `finetune`."""

    verb: Literal["finetune"] = "finetune"
    student: SmallerSettings = SmallerSettings()
    seeds: Annotated[int, Option("--seeds")] = Field(1, gt=0, le=1_000)
    """Number of runs per setting, each with its own seed."""
    metrics: Metrics = Field(default_factory=list)
    grid: Annotated[
        RecipeValues, Option("--grid", kind=list[str], metavar="KEY=V1,V2,...", rare=True)
    ] = Field(default_factory=dict)
    """Values to try, such as lr=2e-5,3e-5; may be repeated."""


class ChosenShape(Section):
    """`student.chosen:`, how kdcli chose the shape for a goal. A run fills it in."""

    goal: str | None = None
    """Goal for which the shape was chosen, such as 2x."""
    shape: str | None = None
    """Shape that was chosen."""
    backend: str | None = None
    """Backend on which the shapes were timed."""
    why: str | None = None
    """Why this shape was chosen."""
    measured: list[str] = Field(default_factory=list)
    """Speed-up and latency of each shape that was timed, and the mean cosine between its vectors
    and the teacher's if it was compared."""


class ShapeSettings(Section):
    """The keys of `student:` that choose the shape for a goal."""

    backend: Annotated[
        BackendName,
        Option("--backend", metavar="NAME[-DTYPE]", values="backend", verb="distill", rare=True),
    ] = "torch"
    """Backend on which shapes are timed for --to 2x or --to 5ms: torch, compile, onnx or
    openvino, perhaps with a number format, such as onnx-int8."""
    chosen: ChosenShape = ChosenShape()


class DownstreamSettings(Section):
    """The `eval` section: tasks on which all models are fine-tuned and compared."""

    tasks: EvalTasks = Field(default_factory=list)
    source: str | None = None
    """Directory with one folder per task, or the data of the only task (default: each task's own
    data)."""
    overrides: RecipeValues = Field(default_factory=dict)
    """Keys of finetune that override each task's recipe."""
    seeds: int = Field(1, gt=0, le=100)
    """Number of fine-tuning runs per model; the report shows mean and deviation."""
