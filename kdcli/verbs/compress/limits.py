"""The limits that a goal sets, each in a class of its own: from its option to its line in a chart.

A new limit is a class, its place in `LIMITS`, and a field of `GoalSettings`. The command line reads
this module for its options, so NumPy is only imported where a limit is checked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from kdcli.deploy.measurements import UNSTABLE_PHRASE, LatencyRow
from kdcli.deploy.measurements import Speedup as PairedSpeedup
from kdcli.recipe.options import GOAL, Option
from kdcli.recipe.sections import MaxClassDrop, Section

if TYPE_CHECKING:
    from pathlib import Path

    from kdcli.deploy.untrained import UntrainedTimes
    from kdcli.report.schema import CascadeFacts, GoalLimit, Throughput
    from kdcli.report.schema_decisions import Decision

POINT = 0.01
SCORE = "score"
"""The axis of a limit of the score."""


@dataclass(frozen=True)
class ScoredModel:
    """The teacher or a candidate, with its score, latency and size.

    Attributes:
        name: The name in the report.
        folder: The directory of the model.
        score: The task's first metric.
        low, high: The ends of the score's 95 % interval, paired with the teacher.
        ms: The latency of one sequence of 128 tokens, the 90th percentile if it is `unstable`;
            infinity before it is measured.
        speedup: The speed-up over the teacher; None for the teacher, and before it is measured.
        mb: The size of the model's files.
        unstable: Whether the measurement of `ms` is unstable.
        throughput: Texts per second in the largest batch that was measured of all models.
        decisions: The comparisons with the teacher class by class, on the selection rows.
        parent: The directory of the training; None for the teacher on a backend.
        costs: Further costs that a limit measures, by label.
        cascade: Of a cascade, its models.
    """

    name: str
    folder: Path
    score: float
    low: float
    high: float
    ms: float
    speedup: PairedSpeedup | None
    mb: float
    unstable: bool = False
    throughput: Throughput | None = None
    decisions: tuple[Decision, ...] = ()
    parent: str | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    cascade: CascadeFacts | None = None


@dataclass(frozen=True)
class Limit(ABC):
    """A limit of a goal.

    Attributes:
        value: The value that the user set.
        strict: Whether the pessimistic end of the score's interval must meet it.
        key: The key of `goal:`.
        is_quality: Whether it limits what training changes. The other limits are known before.
        axis: The cost that it bounds in a chart; empty for none.
        cost: The label of a cost that only this limit measures; empty for none.
    """

    value: float
    strict: bool = False
    key: ClassVar[str]
    is_quality: ClassVar[bool] = False
    axis: ClassVar[str] = ""
    cost: ClassVar[str] = ""

    @abstractmethod
    def miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        """Return how a candidate misses the limit on the selection rows; empty if it meets it."""

    def verified_miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        """Return how a candidate misses a limit of quality on the verification rows."""
        return self.miss(one, teacher)

    def excess(self, times: UntrainedTimes) -> float:
        """Return by what factor a model misses the limit whatever it learns; up to 1 meets it."""
        return 0.0

    def untrained_miss(self, times: UntrainedTimes, *, is_shape: bool) -> str:
        """Return how a shape, or the given model on a backend, misses a limit that it exceeds."""
        return ""

    def is_met_by_model(self, ms: float, mb: float) -> bool:
        """Return whether the given model in torch meets the limit as it is."""
        return True

    @abstractmethod
    def phrase(self) -> str:
        """Write the limit for the report."""

    def line(self, teacher: ScoredModel) -> float | None:
        """Return where a chart draws the limit on its axis; None if it cannot."""
        return self.value

    @staticmethod
    def measure(row: LatencyRow) -> float | None:
        """Return the `cost` in a latency measurement of one sequence."""
        return None

    def of_report(self, teacher: ScoredModel) -> GoalLimit:
        """Return the limit as the report has it."""
        from kdcli.report.schema import GoalLimit

        line = self.line(teacher) if self.axis else None
        return GoalLimit(phrase=self.phrase(), axis=self.axis, line=line)


def option_of(key: str) -> str:
    """Return the option of a limit."""
    return f"--{key.replace('_', '-')}"


def _untrained(slow: str, goal: float, *, is_shape: bool) -> str:
    which = f"even untrained, it {slow}" if is_shape else f"the model itself {slow} on it"
    return f"{which}; the goal is {goal:g}"


def _points(value: float) -> str:
    return f"at most {value:g} point{'' if value == 1 else 's'} lost"


class MaxDrop(Limit):
    """The points of the first metric that a candidate may lose."""

    key, is_quality, axis = "max_drop", True, SCORE

    def miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        from kdcli.metrics.resolution import exceeds

        if one.cascade is not None and exceeds(one.cascade.risk / POINT, self.value):
            most = f"the cascade's one-sided limit of changes is {one.cascade.risk / POINT:.2f}"
            return f"{most} points, more than {self.value:g}"
        lost = (teacher.score - (one.low if self.strict else one.score)) / POINT
        if not exceeds(lost, self.value):
            return ""
        end = " at the interval's lower end" if self.strict else ""
        return f"{lost:.2f} points lost{end}, {lost - self.value:.2f} more than {self.value:g}"

    def phrase(self) -> str:
        end = ", even at the pessimistic end of the interval" if self.strict else ""
        return f"{_points(self.value)}{end}"

    def line(self, teacher: ScoredModel) -> float | None:
        return teacher.score - POINT * self.value


class MaxDropOfClass(Limit):
    """The points that a class, label or entity type may lose."""

    key, is_quality = "max_class_drop", True

    def miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        from kdcli.workloads.decisions import checked_classes

        # Sets without a class that has enough rows are checked on the verification rows alone.
        return self._misses(each for each in one.decisions if checked_classes(each, self.value))

    def verified_miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        return self._misses(one.decisions)

    def _misses(self, decisions: Iterable[Decision]) -> str:
        from kdcli.workloads.decisions import class_drop_miss

        return "; ".join(filter(None, (class_drop_miss(one, self.value) for one in decisions)))

    def phrase(self) -> str:
        return f"{_points(self.value)} by a class"


class Speedup(Limit):
    """How many times as fast as the teacher in torch a candidate must be."""

    key, axis = "speedup", "ms"

    def miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        ratio = one.speedup
        if ratio is None or (ratio.stated or 0.0) >= self.value:
            return ""
        trust = f" ({UNSTABLE_PHRASE})" if ratio.unstable else ""
        measured = "no speed-up" if ratio.is_inconclusive else ratio.phrase(digits=2)
        return f"{measured}{trust}, not {self.value:g}"

    def excess(self, times: UntrainedTimes) -> float:
        return self.value / times.speedup if times.speedup else math.inf

    def untrained_miss(self, times: UntrainedTimes, *, is_shape: bool) -> str:
        slow = f"is only {times.speedup:.1f} times as fast"
        return _untrained(slow, self.value, is_shape=is_shape)

    def is_met_by_model(self, ms: float, mb: float) -> bool:
        return False

    def phrase(self) -> str:
        return f"at least {self.value:g} times as fast"

    def line(self, teacher: ScoredModel) -> float | None:
        # The 90th percentile of the teacher's time would place the limit too far to the right.
        return None if teacher.unstable else teacher.ms / self.value


class MaxLatency(Limit):
    """The milliseconds that one sequence of 128 tokens may take."""

    key, axis = "max_latency_ms", "ms"

    def miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        if one.ms <= self.value:
            return ""
        trust = f" ({UNSTABLE_PHRASE})" if one.unstable else ""
        return f"{one.ms:.2f} ms{trust}, {one.ms - self.value:.2f} above {self.value:g}"

    def excess(self, times: UntrainedTimes) -> float:
        return times.ms / self.value

    def untrained_miss(self, times: UntrainedTimes, *, is_shape: bool) -> str:
        slow = f"takes {times.ms:.2f} ms"
        return _untrained(slow, self.value, is_shape=is_shape)

    def is_met_by_model(self, ms: float, mb: float) -> bool:
        return ms <= self.value

    def phrase(self) -> str:
        return f"at most {self.value:g} ms"


class MaxSize(Limit):
    """The size of the files that one deployment needs."""

    key, axis = "max_mb", "mb"

    def miss(self, one: ScoredModel, teacher: ScoredModel) -> str:
        from kdcli.report.text import megabytes

        if one.mb <= self.value:
            return ""
        over = f"{megabytes(one.mb - self.value)} above {self.value:g}"
        return f"{megabytes(one.mb)} MB, {over}"

    def excess(self, times: UntrainedTimes) -> float:
        return times.min_mb / self.value

    def untrained_miss(self, times: UntrainedTimes, *, is_shape: bool) -> str:
        from kdcli.report.text import megabytes

        what = "its layers alone take" if is_shape else "the model itself takes"
        return f"{what} at least {megabytes(times.min_mb)} MB, more than {self.value:g}"

    def is_met_by_model(self, ms: float, mb: float) -> bool:
        return 0 < mb <= self.value

    def phrase(self) -> str:
        return f"at most {self.value:g} MB"


LIMITS: tuple[type[Limit], ...] = (MaxDrop, MaxDropOfClass, Speedup, MaxLatency, MaxSize)
QUALITY = {limit.key for limit in LIMITS if limit.is_quality}


class GoalSettings(Section):
    """`goal:`. Speed and latency refer to one sequence of 128 tokens."""

    max_drop: Annotated[float | None, Option("--max-drop", panel=GOAL, metavar="POINTS")] = Field(
        None, ge=0
    )
    """Maximum drop of the task metric, in points (1 point = 0.01; --max-drop 1% too); without
    labels, of agreement with MODEL."""
    max_class_drop: MaxClassDrop = None
    speedup: Annotated[float | None, Option("--speedup", panel=GOAL, metavar="FACTOR")] = Field(
        None, gt=1
    )
    """Minimum speed-up over PyTorch in float32."""
    max_latency_ms: Annotated[
        float | None, Option("--max-latency-ms", panel=GOAL, metavar="MS")
    ] = Field(None, gt=0)
    """Maximum latency of 128 tokens, in milliseconds."""
    max_mb: Annotated[float | None, Option("--max-mb", panel=GOAL, metavar="MB")] = Field(
        None, gt=0
    )
    """Maximum size of the deployed files, in megabytes."""
    strict: Annotated[bool, Option("--strict", panel=GOAL, rare=True)] = False
    """Apply --max-drop to the pessimistic end of the 95 % interval."""

    cascade: Annotated[bool, Option("--cascade", panel=GOAL)] = False
    """Also try a cascade: a small model answers, and a larger one where it is unsure."""

    @property
    def limits(self) -> list[Limit]:
        """The limits that are set."""
        values = {limit: getattr(self, limit.key) for limit in LIMITS}
        return [limit(value, self.strict) for limit, value in values.items() if value is not None]

    @property
    def is_bounded(self) -> bool:
        """Whether speed or size is limited. `max_drop` alone asks for the fastest model."""
        return any(not limit.is_quality for limit in self.limits)

    @property
    def is_of_speed(self) -> bool:
        """Whether speed or latency is limited."""
        return any(limit.axis == "ms" for limit in self.limits)

    def misses(self, one: ScoredModel, teacher: ScoredModel) -> dict[str, str]:
        """Return how a candidate misses the goal on the selection rows, by limit."""
        return _missed({limit.key: limit.miss(one, teacher) for limit in self.limits})

    def verified_misses(self, one: ScoredModel, teacher: ScoredModel) -> dict[str, str]:
        """Return how a candidate misses the limits of quality on the verification rows."""
        own = [limit for limit in self.limits if limit.is_quality]
        return _missed({limit.key: limit.verified_miss(one, teacher) for limit in own})

    def untrained_misses(
        self, times: UntrainedTimes, *, best: bool = False, is_shape: bool = True
    ) -> dict[str, str]:
        """Return how a model misses the goal whatever it learns, by limit.

        Args:
            times: The latencies of an untrained shape, or of the given model on a backend.
            best: Whether the better quartiles decide instead of the medians.
            is_shape: Whether the latencies are a shape's.
        """
        if not times.measured:
            why = "it gave wrong output on the backend and was not measured"
            return {limit.key: why for limit in LIMITS if not limit.is_quality}
        if best:
            times = replace(times, ms=times.best_ms, speedup=times.best_speedup)
        return {
            limit.key: limit.untrained_miss(times, is_shape=is_shape)
            for limit in self.limits
            if limit.excess(times) > 1
        }

    def closest(self, times: Mapping[str, UntrainedTimes]) -> str:
        """Return the name of the model that misses the goal least, whatever it learns.

        A model that could not be measured comes after the others.
        """

        def excess(name: str) -> float:
            if not times[name].measured:
                return math.inf
            return max(one.excess(times[name]) for one in self.limits)

        return min(times, key=excess)

    def untrained_whys(
        self, times: Mapping[str, UntrainedTimes], *, best: bool = False, is_shape: bool = True
    ) -> dict[str, str]:
        """Return why models miss the goal whatever they learn, by name; see `untrained_misses`."""
        missed = {
            name: self.untrained_misses(one, best=best, is_shape=is_shape)
            for name, one in times.items()
        }
        return {n: "; ".join(dict.fromkeys(whys.values())) for n, whys in missed.items() if whys}


def _missed(whys: Mapping[str, str]) -> dict[str, str]:
    return {key: why for key, why in whys.items() if why}


def conflict(missed: list[dict[str, str]]) -> str:
    """Name two limits that some candidates meet, but none meets together; empty if there are none.

    `missed` has the misses of each candidate, by limit.
    """
    for pair in map(set, combinations([limit.key for limit in LIMITS], 2)):
        met = [pair - one.keys() for one in missed]
        if pair not in met and set().union(*met) == pair:
            names = " and ".join(map(option_of, sorted(pair)))
            return f"{names} contradict each other here: each can be met, but not both"
    return ""
