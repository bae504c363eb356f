"""Recipe sections of a labelled task (data, head, training) and the recipe of `finetune`."""

from typing import Any, Literal

from pydantic import Field

from kdcli.recipe.sections import BatchSize, Init, Length, MeasureSettings, Section, TrainSettings


class LabelledSettings(Section):
    """`data:` of the verbs that work on a labelled task.

    `source` null is the task's own data; `train` is another source of the training split (cross-lingual tasks).
    `columns` names the columns of an own task; `max_length` null is the task's own; `stride` is the overlap of the
    windows of a long context. `train_rows` and `judged_rows` cut the data to a fixed choice. `split_seed` chooses the
    rows that are held back where there is no validation split. `skip_bad` leaves out rows that cannot be used.
    `judge_trained_rows` judges also by rows that trained a judged model. `labels: teacher` ignores the labels, if the
    rows have any: only the teacher is learned, and scores are the agreement with it.
    """

    source: str | None = None
    train: str | None = None
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    max_length: Length | None = None
    stride: int = Field(128, ge=0)
    split: Literal["validation", "test"] = "validation"
    split_seed: int = Field(0, ge=0, lt=2**63)
    train_rows: int | None = Field(None, gt=0)
    judged_rows: int | None = Field(None, gt=0)
    skip_bad: bool = False
    judge_trained_rows: bool = False
    labels: Literal["data", "teacher"] = "data"


class HeadSettings(Section):
    """`head:`; `label_map` lists the data's number of each label, for a checkpoint with labels in another order."""

    label_map: list[int] | None = None


class TaskHeadSettings(HeadSettings):
    """`head:` of the verbs that train on a task. `kind` `scratch` trains the checkpoint's own head or a new one;
    `embedding` and `mlm` are frozen heads of label words (`kdcli.models.label_words`); null is the method's default.
    `words` are one per label, in label order."""

    kind: Literal["scratch", "embedding", "mlm"] | None = None
    words: list[str] | None = None


class FinetuneTrainSettings(TrainSettings):
    """`train:` of `finetune`, in the middle of what papers try on GLUE. A micro-batch groups rows of similar length:
    `micro_batch_size` rows, by default 8, or 16 short ones. Groups are formed from `pool` batches drawn together; 1
    draws each batch at random."""

    lr: float = Field(3e-5, gt=0)
    batch_size: BatchSize = 32
    warmup_fraction: float = Field(0.1, ge=0, lt=1)
    eval_every: int = Field(500, gt=0)
    pool: int = Field(64, gt=0, le=10**4)


class GenerationSettings(Section):
    """`generation:`, of tasks whose targets are texts. In training `masked` is the share of a target's tokens that are
    masked and predicted; `label_smoothing` spreads that share of each over the vocabulary. Decoding: `beams` 1 is
    greedy; a beam's log probability is divided by its length to the power of `length_penalty`; `no_repeat_ngram` 0
    allows repetition; a target has `min_tokens` before its end token and `max_tokens` with it."""

    masked: float = Field(0.7, gt=0, lt=1)
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    beams: int = Field(5, gt=0, le=100)
    length_penalty: float = Field(1.0, ge=-10, le=10)
    no_repeat_ngram: int = Field(0, ge=0, le=100)
    min_tokens: int = Field(0, ge=0, le=10_000)
    max_tokens: int = Field(48, gt=1, le=10_000)


class OnTask(Section):
    """The sections of every verb that trains on a task. `keep` selects the last weights or those of the best
    evaluation. `workload` holds settings of the task's own kind, where its kind has any. `choose_on` names the set that decides among evaluations and runs; null is the mean over all sets."""

    task: str | None = None
    keep: Literal["last", "best"] = "last"
    choose_on: str | None = None
    workload: dict[str, Any] = Field(default_factory=dict)
    head: TaskHeadSettings = TaskHeadSettings()
    data: LabelledSettings = LabelledSettings()
    train: FinetuneTrainSettings = FinetuneTrainSettings()
    measure: MeasureSettings = MeasureSettings()


class TaskRecipe(OnTask):
    """The recipe of a verb that trains one given model on a task."""

    verb: Literal["finetune", "prune"]
    model: str | None = None


class FinetuneRecipe(TaskRecipe):
    """The recipe of `finetune`. `metrics` are names, scripts or directories of the `evaluate` library, reported beside
    the task's own metrics. `grid` maps recipe keys to lists of values; every combination runs with `seeds` seeds from
    `train.seed` on."""

    verb: Literal["finetune"] = "finetune"
    generation: GenerationSettings = GenerationSettings()
    seeds: int = Field(1, gt=0, le=1_000)
    metrics: list[str] = Field(default_factory=list)
    grid: dict[str, Any] = Field(default_factory=dict)


class RerankData(Section):
    """`data:` of rerankers; `max_length` null is 256 tokens of query and passage. `split_seed` chooses the queries that
    are held back where there is no validation split."""

    source: str | None = None
    max_length: Length | None = None
    split_seed: int = Field(0, ge=0, lt=2**63)


class RankingSettings(Section):
    """`ranking:`. `loss` null is `margin-mse` against scores and `listwise` against labels alone. `weight` is that of
    the loss against scores; labels, where there are any, get the rest. `temperature` is of `listwise`."""

    loss: Literal["margin-mse", "listwise", "pointwise"] | None = None
    weight: float = Field(1.0, ge=0, le=1)
    temperature: float = Field(1.0, gt=0)


class RerankStudentSettings(Section):
    """`student:` of a reranker: `source` null copies the teacher; the rest as of `distill`."""

    to: str | None = None
    source: str | None = None
    init: Init = "teacher"
    layers: list[int] | None = None


class RerankRecipe(Section):
    """A recipe of `kdcli distill --task rerank` and `kdcli finetune --task rerank`. `teacher` null: the scores are in
    the data, or there are labels alone. `cache_gb` is the disk budget of the teacher's scores."""

    verb: Literal["rerank"] = "rerank"
    task: Literal["rerank"] = "rerank"
    teacher: str | None = None
    student: RerankStudentSettings = RerankStudentSettings()
    ranking: RankingSettings = RankingSettings()
    data: RerankData = RerankData()
    keep: Literal["last", "best"] = "last"
    train: FinetuneTrainSettings = FinetuneTrainSettings()
    measure: MeasureSettings = MeasureSettings()
    cache_gb: float = Field(8.0, gt=0)


class DownstreamSettings(Section):
    """`eval:`, the tasks on which a report compares models, each fine-tuned alike. `source` is a directory with a
    folder per task, or the data of the only task; null is each task's own data. `overrides` are keys of `finetune` set
    over the task's recipe. `seeds`: runs of every fine-tuning, of which the report shows mean and deviation."""

    tasks: list[str] = Field(default_factory=list)
    source: str | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    seeds: int = Field(1, gt=0, le=100)


class VectorSettings(Section):
    """`embedding:` of verbs that learn the vectors of an embedding model. `pooling` null is the model's own; `unit`:
    documents are cut into sentences, or left whole; `rows` limits the texts; `anchors` are the texts of `similarity`
    and `contrastive`. `cache_gb` is the disk budget for the vectors, which stay in the cache for later runs."""

    pooling: str | None = None
    unit: Literal["sentence", "document"] = "sentence"
    rows: int | None = Field(None, gt=1)
    anchors: int = Field(1024, gt=0)
    cache_gb: float = Field(20.0, gt=0)
