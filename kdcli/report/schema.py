"""report.json, schema 1."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kdcli.types import Card

# Names of models: what `distill` compares with, the one between teacher and student, the one model of `finetune`.
TEACHER, ASSISTANT, FINETUNED = "teacher", "assistant", "finetuned"
UNDISTILLED = (
    " undistilled"  # Suffix of the name under which a student's quality before training stands
)
AT = " at step "  # Between the name of a student and a step after which it was scored too

Role = Literal[
    "teacher",  # the model that others learn from
    "assistant",  # taught by the teacher, teaches the student
    "student",
    "peer",  # one of two models that are trained together
    "finetuned",
    "pruned",
    "trimmed",
    "candidate",  # evaluated or measured as it is, next to a baseline
    "baseline",  # what the others are compared with
    "undistilled",  # a student before distillation, or trained without a teacher
    "checkpoint",  # a model after an earlier step of its training
    "form",  # the weights of another model on another backend
]
"""What a model is in its report."""

Quality = dict[str, dict[str, dict[str, float]]]
"""Task and set, or another measure -> model -> metric -> value."""

# JSON cannot hold the outputs of a broken backend, which are not numbers.
FiniteOrNone = Annotated[
    float | None, BeforeValidator(lambda v: v if v is None or math.isfinite(v) else None)
]


def _read_card(value: Any) -> Any:
    """Make a card from its JSON object; pydantic checks the types of its fields afterwards."""
    if not isinstance(value, dict):
        return value
    try:
        return Card(**value)
    except TypeError as error:
        raise ValueError(str(error).removeprefix("Card.__init__() ")) from None


CheckedCard = Annotated[Card, BeforeValidator(_read_card)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Training(_Part):
    """Cost and losses of the training."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss_first: float | None
    loss_last: float | None
    peak_memory_bytes: int
    resumed_from_step: int | None


class LatencyRow(_Part):
    """One model in one cell; times of a whole batch in milliseconds. `dtype` is fp32, bf16, fp16 or int8 (float32 in
    reports of earlier versions), `padding` full, random or data. `p99_ms` needs 100 runs, `tokens_per_second` counts
    real tokens, `peak_memory_bytes` the weights and one call."""

    model: str
    backend: str
    device: str
    dtype: str
    batch_size: int
    seq_len: int
    padding: str
    n: int
    p50_ms: float
    p90_ms: float
    p95_ms: float
    mean_ms: float
    iqr_over_p50: float
    status: Literal["ok", "noisy", "unstable"]
    p99_ms: float | None = None
    tokens_per_second: float | None = None
    load_seconds: float | None = None
    first_call_ms: float | None = None
    peak_memory_bytes: int | None = None


class Speedup(_Part):
    """Median and quartiles of the ratios of paired runs."""

    median: float
    low: float
    high: float
    batch_size: int
    seq_len: int


class Failure(_Part):
    """What could not be measured, and why; without a cell where it could not be prepared."""

    model: str
    backend: str
    dtype: str
    batch_size: int | None = None
    seq_len: int | None = None
    reason: str


class Agreement(_Part):
    """The output of a model on a backend beside that of torch in float32: `wrong` when `relative` is beyond `limit`,
    None where not finite; `metric` is a task's on this backend."""

    model: str
    backend: str
    dtype: str
    max_abs: FiniteOrNone
    relative: FiniteOrNone
    cosine: FiniteOrNone
    limit: float
    wrong: bool
    metric: float | None = None


class PublishedRow(_Part):
    """A row of a paper, to read beside ours: a value a column; or of a metric of a task a value a set, in per cent, of
    the variant that our model `beside` it is."""

    row: str
    source: str
    values: dict[str, float]
    task: str | None = None
    metric: str | None = None
    beside: str | None = None


class CurvePoint(_Part):
    """A logged step: the training loss; the held-out loss and the metrics of a task where they were taken."""

    step: int
    loss: float | None
    held_out: dict[str, float] | None
    metrics: dict[str, float] | None = None


class ClassScore(_Part):
    """Scores of one class; `span` tasks have the classes `answer` and `no answer`."""

    precision: float
    recall: float
    f1: float
    support: int


class Confusion(_Part):
    """Counts by true class (row) and predicted class (column)."""

    labels: list[str]
    counts: list[list[int]]


class Mistake(_Part):
    """One of the worst examples, ordered by `badness`: a loss, an error, or one minus F1."""

    id: str
    texts: list[str]
    label: str
    predicted: str
    badness: float


class Evaluation(_Part):
    """The scores of one model on one set of a task.

    `set` is empty if the task has only one set. `reference` is what the outputs are compared with:
    the labels of the rows, or the teacher's outputs. `rows_sha256` is a hash of the examples that
    does not depend on their order. If a model was fine-tuned with several seeds, `metrics` are
    means over the seeds, and `deviations` are the sample standard deviations.
    """

    model: str
    task: str
    set: str
    split: str
    n: int
    metrics: dict[str, float]
    reference: Literal["labels", "teacher"] = "labels"
    confusion: Confusion | None = None
    per_class: dict[str, ClassScore] = Field(default_factory=dict)
    worst: list[Mistake] = Field(default_factory=list)
    rows_sha256: str | None = None
    seeds: int = 1
    deviations: dict[str, float] = Field(default_factory=dict)


class Comparison(_Part):
    """A model's metric minus the baseline's on the same examples.

    `low` and `high` are the 2.5 and 97.5 percentiles over paired bootstrap resamples of the
    examples. `chosen_on_these_rows`: the same examples also chose the model, among steps, settings
    or candidates, so that the difference is optimistic.
    """

    model: str
    baseline: str
    task: str
    set: str
    metric: str
    difference: float
    low: float
    high: float
    chosen_on_these_rows: bool = False


class RunRow(_Part):
    """One run of a grid: its settings and its metrics."""

    settings: dict[str, float | int | str]
    seed: int
    metrics: dict[str, float]


class Selection(_Part):
    """The run chosen of several: the setting with the best mean of `metric` over seeds, then its best seed."""

    metric: str
    on: str
    settings: dict[str, float | int | str]
    seed: int
    runs: list[RunRow]


class PrunedMatrix(_Part):
    """One masked matrix: `name` is layer and type, `3.Q`; `kept` of its `weights` are not masked."""

    name: str
    layer: int
    kind: str
    weights: int
    kept: int


class Histogram(_Part):
    """Distribution of the scores after a step: `counts[i]` of them lie between `edges[i]` and `edges[i + 1]`."""

    step: int
    edges: list[float]
    counts: list[int]


class DensityPoint(_Part):
    """Share of the masked matrices' weights that was kept after a step."""

    step: int
    density: float


class Pruning(_Part):
    """A pruned model: requested `sparsity`, `density` that is left, and in `heads`, layer by layer, the share of the
    weights of Q, K, V and O that each attention head keeps."""

    model: str
    method: str
    masking: str | None
    sparsity: float
    density: float
    matrices: list[PrunedMatrix]
    heads: list[list[float]]
    curve: list[DensityPoint]
    histograms: list[Histogram]


class Candidate(_Part):
    """A candidate of a compression: `score` with the ends of its paired interval, `ms` and `speedup` of one sequence of
    128 tokens, `mb` of its files; without numbers where it was left out. `outcome` says what became of it."""

    name: str
    score: float | None = None
    low: float | None = None
    high: float | None = None
    ms: float | None = None
    speedup: float | None = None
    mb: float | None = None
    outcome: str


class Compression(_Part):
    """What `compress` tried, the teacher first; `goal` holds the limits that were given, `max_drop` in points."""

    task: str
    metric: str
    rows: int
    goal: dict[str, float]
    strict: bool
    met: bool
    chosen: str
    sentence: str
    candidates: list[Candidate]


class Report(_Part):
    """report.json. `beside` has the curves of runs that this one is compared with, by name."""

    # Revalidation checks the types of the cards' fields.
    model_config = ConfigDict(revalidate_instances="always")

    schema_version: Literal[1] = Field(1, alias="schema")
    command: str
    status: Literal["done"]
    created: str
    versions: dict[str, str]
    environment: dict[str, Any]
    recipe: dict[str, Any]
    models: dict[str, CheckedCard]
    runs: dict[str, str] = Field(default_factory=dict)
    training: Training | None
    curve: list[CurvePoint]
    beside: dict[str, list[CurvePoint]] = Field(default_factory=dict)
    quality: Quality
    latency: list[LatencyRow]
    speedup: dict[str, Speedup]
    published: list[PublishedRow]
    notes: list[str]
    evaluations: list[Evaluation] = Field(default_factory=list)
    comparisons: list[Comparison] = Field(default_factory=list)
    selection: Selection | None = None
    pruning: list[Pruning] = Field(default_factory=list)
    failures: list[Failure] = Field(default_factory=list)
    agreements: list[Agreement] = Field(default_factory=list)
    compression: Compression | None = None

    @property
    def cards(self) -> dict[str, Card]:
        """The models that have a card, by name, in the order of the report."""
        return self.models

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, by_alias=True) + "\n"
