"""Measurements of latency, as report.json has them."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

FiniteOrNone = Annotated[
    float | None, BeforeValidator(lambda v: v if v is None or math.isfinite(v) else None)
]
"""A number, or None for the NaN or infinity of a broken backend, which JSON cannot hold."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Speedup(_Part):
    """Median and quartiles of the paired ratios of a baseline's times to a model's."""

    baseline: str
    median: float
    low: float
    high: float


class LatencyRow(_Part):
    """One model in one cell. Times are of a whole batch.

    `dtype` is fp32, bf16, fp16, int8 or q4, and `padding` is full, random or data. `status` says
    how far to trust the times. `p99_ms` needs 100 runs. `tokens_per_second` counts real tokens, and
    `peak_memory_bytes` is the size of the weights and of one call. `speedup` is null for the row
    that the others are compared with.
    """

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
    speedup: Speedup | None = None
    p99_ms: float | None = None
    tokens_per_second: float | None = None
    load_seconds: float | None = None
    first_call_ms: float | None = None
    peak_memory_bytes: int | None = None


class Failure(_Part):
    """A measurement that failed. It has no cell if the model could not be prepared at all."""

    model: str
    backend: str
    dtype: str
    batch_size: int | None = None
    seq_len: int | None = None
    reason: str


class Agreement(_Part):
    """The difference between a backend's output and the output of torch in float32.

    The output is `wrong` if the `relative` error exceeds `limit`; then the backend is not measured.
    Errors are null if they are not finite. `metric` is a task's metric on this backend.
    """

    model: str
    backend: str
    dtype: str
    max_abs: FiniteOrNone
    relative: FiniteOrNone
    cosine: FiniteOrNone
    limit: float
    wrong: bool
    metric: float | None = None
