"""report.json, schema 1."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Card(_Part):
    """What a model is. `bytes` of its weights on disk; `multiply_adds` of one sequence of 128 tokens."""

    id: str
    model_type: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    params_total: int
    params_embedding: int
    params_transformer: int
    params_nonzero: int
    multiply_adds: int
    bytes: int
    sha256: str | None


class Training(_Part):
    """What the run took."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss_first: float | None
    loss_last: float | None
    peak_memory_bytes: int
    resumed_from_step: int | None


class LatencyRow(_Part):
    """One model in one cell; times of a whole batch in milliseconds."""

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


class Speedup(_Part):
    """Median and quartiles of the ratios of paired runs."""

    median: float
    low: float
    high: float
    batch_size: int
    seq_len: int


class PublishedRow(_Part):
    """A row of a paper, to read beside ours."""

    row: str
    source: str
    values: dict[str, float]


class CurvePoint(_Part):
    """A logged step: the training loss; the held-out loss and the metrics of a task where they were taken."""

    step: int
    loss: float | None
    held_out: dict[str, float] | None
    metrics: dict[str, float] | None = None


class ClassScore(_Part):
    """How well one class is found; of `span` tasks the classes are `answer` and `no answer`."""

    precision: float
    recall: float
    f1: float
    support: int


class Confusion(_Part):
    """Counts by true class (row) and predicted class (column)."""

    labels: list[str]
    counts: list[list[int]]


class Mistake(_Part):
    """An example the model does badly on. `badness` orders them: a loss, an error, or one minus F1."""

    id: str
    texts: list[str]
    label: str
    predicted: str
    badness: float


class Evaluation(_Part):
    """What one model does on one set of a task. `set` is empty when the task has only one."""

    model: str
    task: str
    set: str
    split: str
    n: int
    metrics: dict[str, float]
    confusion: Confusion | None
    per_class: dict[str, ClassScore]
    worst: list[Mistake]


class Comparison(_Part):
    """A metric of a model minus that of the baseline on the same examples; `low` and `high` are the 2.5 and 97.5
    percentiles of paired bootstrap resamples of the examples."""

    model: str
    baseline: str
    task: str
    set: str
    metric: str
    difference: float
    low: float
    high: float


class RunRow(_Part):
    """One run of a grid: what it was given, and the metrics it reached."""

    settings: dict[str, float | int | str]
    seed: int
    metrics: dict[str, float]


class Selection(_Part):
    """How one run was chosen of several: the setting with the best mean of `metric` over seeds, then its best seed."""

    metric: str
    on: str
    settings: dict[str, float | int | str]
    seed: int
    runs: list[RunRow]


class Report(_Part):
    """The whole of report.json."""

    schema_version: Literal[1] = Field(1, alias="schema")
    command: str
    status: Literal["done"]
    created: str
    versions: dict[str, str]
    environment: dict[str, Any]
    recipe: dict[str, Any]
    models: dict[str, Card]
    training: Training | None
    curve: list[CurvePoint]
    quality: dict[str, dict[str, dict[str, float]]]
    latency: list[LatencyRow]
    speedup: dict[str, Speedup]
    published: list[PublishedRow]
    notes: list[str]
    evaluations: list[Evaluation] = Field(default_factory=list)
    comparisons: list[Comparison] = Field(default_factory=list)
    selection: Selection | None = None

    def to_json(self) -> str:
        """The file's text."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"
