"""Measurements of latency, as report.json has them."""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveFloat, model_validator

FiniteOrNone = Annotated[
    float | None, BeforeValidator(lambda v: v if v is None or math.isfinite(v) else None)
]
"""A number, or None for the NaN or infinity of a broken backend, which JSON cannot hold."""

SECONDS_PER_HOUR = 3600
TEXTS = 1_000_000
"""Number of texts that a cost refers to."""
UNSTABLE_PHRASE = "unstable measurement"
"""The words next to every figure of an unstable measurement."""
MEASURE_AGAIN = "measure again on an idle machine, with kdcli benchmark"
"""The remedy if times give no speed-up."""


class SchemaPart(BaseModel):
    """The base of every part of a report. Unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Speedup(SchemaPart):
    """Median and quartiles of the paired ratios of a baseline's times to a model's.

    `unstable`: the times of the model or of the baseline were unstable. Then the reported speed-up
    is `low`: the lower quartile of the ratios, or the baseline's fastest run over the 90th
    percentile of the model's times if that is smaller. A `low` below 1 is inconclusive, and no
    speed-up is reported.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    baseline: str
    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    unstable: bool

    @property
    def is_inconclusive(self) -> bool:
        """Whether the times are so unstable that the model may even be slower."""
        return self.unstable and self.low < 1

    @property
    def stated(self) -> float | None:
        """The reported speed-up: the median, `low` if it is unstable, None if inconclusive."""
        return None if self.is_inconclusive else self._factor

    def phrase(self, unit: str = " times as fast", *, digits: int = 1) -> str:
        """Write the speed-up: `20.3 times as fast`, or `at least 19.1 times as fast`.

        Do not write it if `is_inconclusive`.
        """
        return f"{'at least ' if self.unstable else ''}{self._factor:.{digits}f}{unit}"

    @property
    def _factor(self) -> float:
        return self.low if self.unstable else self.median

    def trust(self, *, digits: int = 1) -> str:
        """Write how far to trust `phrase`: its quartiles, or the words for an unstable one."""
        return UNSTABLE_PHRASE if self.unstable else f"{self.low:.{digits}f}–{self.high:.{digits}f}"


class LatencyRow(SchemaPart):
    """One model in one cell. Times are of a whole batch.

    `dtype` is fp32, bf16, fp16, int8 or q4, and `padding` is full, random or data. `status` says
    how far to trust the times: the reported time of an unstable row is `p90_ms`. `p99_ms` needs
    100 runs. `tokens_per_second` counts the real tokens in the reported time, and
    `peak_memory_bytes` is the size of the weights and of one call. `speedup` is null for the row
    that the others are compared with. `texts_per_second` is the batch size over the reported time,
    and `cost_per_million` is the price of computing a million texts at that rate, in the currency
    of the report's `price_per_hour`. Reports fill in both.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    model: str
    backend: str
    device: str
    dtype: str
    batch_size: int
    seq_len: int
    padding: str
    n: int
    p50_ms: PositiveFloat
    p75_ms: PositiveFloat
    p90_ms: PositiveFloat
    p95_ms: PositiveFloat
    mean_ms: PositiveFloat
    iqr_over_p50: float
    status: Literal["ok", "noisy", "unstable"]
    speedup: Speedup | None = None
    p99_ms: float | None = None
    tokens_per_second: float | None = None
    load_seconds: float | None = None
    first_call_ms: float | None = None
    peak_memory_bytes: int | None = None
    texts_per_second: float | None = None
    cost_per_million: float | None = None

    @model_validator(mode="after")
    def _check_speedup(self) -> Self:
        if self.unstable and self.speedup is not None and not self.speedup.unstable:
            raise ValueError("the times are unstable, but the speed-up is not")
        return self

    @property
    def cell(self) -> tuple[int, int]:
        """The batch size and the number of tokens."""
        return self.batch_size, self.seq_len

    @property
    def unstable(self) -> bool:
        """Whether the times spread too far for their median to mean anything."""
        return self.status == "unstable"

    @property
    def stated_ms(self) -> float:
        """The reported time: the median, or the 90th percentile if the row is unstable."""
        return self.p90_ms if self.unstable else self.p50_ms

    def priced(self, price_per_hour: float | None) -> Self:
        """Fill in the throughput and, at a price per hour of the machine, the cost."""
        rate, cost = 1000 * self.batch_size / self.stated_ms, None
        if price_per_hour is not None:
            cost = price_per_hour / SECONDS_PER_HOUR / rate * TEXTS
        return self.model_copy(update={"texts_per_second": rate, "cost_per_million": cost})


class Failure(SchemaPart):
    """A measurement that failed. It has no cell if the model could not be prepared at all."""

    model: str
    backend: str
    dtype: str
    batch_size: int | None = None
    seq_len: int | None = None
    reason: str


class Agreement(SchemaPart):
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
