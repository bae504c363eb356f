"""Measure how fast students are before any training, and choose the largest that is fast enough.

Latency depends on a student's shape and not on its weights, so students with random weights are
measured. All times are of one sequence of 128 tokens, next to the teacher in torch in float32.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from kdcli.deploy.latency import Latency, Protocol, Subject, measure_latency
from kdcli.disk import as_directory
from kdcli.errors import GateError, Interrupted, MachineError, UsageError
from kdcli.models.card import describe
from kdcli.models.grammar import SpeedGoal, short_name
from kdcli.models.load import save_model
from kdcli.models.model import Model
from kdcli.models.shape import build_student, student_config
from kdcli.models.training_rows import NO_ROWS
from kdcli.types import Card, ModelShape

WIDTHS = (1.0, 0.75, 0.5)
"""Shares of the teacher's width that a student may have, in the order in which they are tried."""
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "q4": 0.5}
"""Bytes that a parameter takes at least, by the precision of a backend."""


@dataclass(frozen=True)
class UntrainedTimes:
    """How fast a model is on one sequence of 128 tokens, compared with torch in float32.

    Attributes:
        ms, speedup: the medians.
        best_ms, best_speedup: the better quartile. Other load on the machine slows the median more.
        min_mb: a lower bound on the size of its weights, in megabytes; see the function `min_mb`.
    """

    ms: float = math.inf
    speedup: float = 0.0
    best_ms: float = math.inf
    best_speedup: float = 0.0
    min_mb: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the model gave correct output on the backend, so that it could be measured."""
        return self.ms < math.inf

    def __str__(self) -> str:
        """Return `2.31x, 8.20 ms`."""
        return f"{self.speedup:.2f}x, {self.ms:.2f} ms" if self.measured else "not measured"


UNTIMED = UntrainedTimes(0.0, 1.0, 0.0, 1.0)
"""Times that were not measured, because nothing depends on them."""

Measure = Callable[[Mapping[str, ModelShape]], Mapping[str, UntrainedTimes]]
"""Measures untrained students by name."""
QUARTILE = "the medians left no shape, because the machine was busy: the better quartiles decided"
"""The message when the better quartiles chose the shape."""


@dataclass(frozen=True)
class FastShape:
    """The shape that was chosen for a goal, and what was measured.

    Attributes:
        name: the shape.
        times: every shape that was measured, from large to small.
        by_quartile: whether the better quartiles of the times decided, because the medians left
            no shape.
    """

    name: str
    times: Mapping[str, UntrainedTimes]
    by_quartile: bool = False


def measured_times(subjects: Sequence[Subject], protocol: Protocol) -> dict[str, UntrainedTimes]:
    """Measure models, and return the times by name. Wrong output has no times.

    Raises MachineError: the first one, with which the others are compared, could not be measured;
        Interrupted: Ctrl-C.
    """
    latency = measure_latency(subjects, protocol)
    if latency.interrupted:
        raise Interrupted("stopped before anything was written")
    return times_of(subjects, latency)


def times_of(subjects: Sequence[Subject], latency: Latency) -> dict[str, UntrainedTimes]:
    """Return the measured times by name.

    Raises MachineError: the first subject, with which the others are compared, has no times.
    """
    measured = {row.model for row in latency.rows}
    if subjects[0].name not in measured:
        failures = [one.reason for one in latency.failures if one.model == subjects[0].name]
        why = "; ".join(failures) or "it gave no result"
        raise MachineError(f"the teacher could not be measured: {why}", "run kdcli doctor")
    times = {}
    for row in latency.rows:
        ms, ratio = row.p50_ms, row.speedup
        speedup, best = (ratio.median, ratio.high) if ratio else (1.0, 1.0)
        times[row.model] = UntrainedTimes(ms, speedup, ms * speedup / best, best)
    return times


def untrained_student(teacher: Model, shape: ModelShape, seed: int) -> PreTrainedModel:
    """Build a student with random weights.

    Raises UsageError: the teacher has no student of this shape.
    """
    return build_student(teacher.model, shape, init="random", seed=seed).model


def times_of_shapes(
    shapes: Mapping[str, ModelShape],
    teacher: Model,
    backend: str,
    baseline: Subject,
    seed: int,
    times: Callable[[Sequence[Subject]], Mapping[str, UntrainedTimes]],
) -> dict[str, UntrainedTimes]:
    """Measure students of a teacher with random weights on a backend, by name.

    Args:
        shapes: the students.
        teacher: their teacher.
        backend: such as `torch` or `onnx-int8`.
        baseline: the teacher in torch, with which they are compared.
        seed: the seed of their weights.
        times: measures models. The first one is the baseline.
    """
    subjects, sizes = [baseline], {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, shape in shapes.items():
            student = untrained_student(teacher, shape, seed)
            folder = Path(temporary) / as_directory(name)
            save_model(student, teacher.tokenizer, folder, NO_ROWS)
            subjects.append(subject_of(name, str(folder), backend))
            card = describe(student, name, None)
            sizes[name] = min_mb(card, backend, keeps_vocabulary=False)
        measured = times(subjects)
    return {
        name: replace(measured.get(name, UntrainedTimes()), min_mb=mb) for name, mb in sizes.items()
    }


def min_mb(card: Card, backend: str, *, keeps_vocabulary: bool) -> float:
    """Return a lower bound on the size of a model's weights on a backend, in megabytes.

    Without `keeps_vocabulary`, the embeddings do not count, because the vocabulary may be trimmed.
    """
    parameters = card.params_total if keeps_vocabulary else card.params_transformer
    engine, _, precision = backend.partition("-")
    if engine == "sparse":
        return 0.0  # It stores only the weights that are not zero.
    return parameters * BYTES[precision or "fp32"] / 1e6


def subject_of(name: str, source: str, backend: str) -> Subject:
    """Return a model to measure on a backend such as `onnx-int8`."""
    engine, _, precision = backend.partition("-")
    return Subject(name, source, engine, precision or "fp32")


def choose_shape(goal: SpeedGoal, teacher: Model, measure: Measure) -> FastShape:
    """Choose the student with the most layers that is fast enough.

    It has the teacher's width. If even one layer is too slow, it has three quarters of the width,
    and then half of it. A few shapes are measured, because a layer less is always faster. The
    medians decide. If they leave no shape, the better quartiles decide, because a busy machine
    slows short calls most.

    Args:
        goal: the goal.
        teacher: the model that the student is made from.
        measure: measures untrained students.

    Raises:
        UsageError: the teacher has no smaller student.
        GateError: no student is fast enough.
    """
    full, times = teacher.shape, dict[str, UntrainedTimes]()
    shapes = list(_widths(teacher))
    if not shapes:
        raise UsageError(
            f"{teacher.source} ({full}) has no smaller student to choose from",
            "give a shape LxH instead of a goal",
        )
    for widest in shapes:
        layers = _most_layers(goal, widest, full, times, measure)
        if layers:
            name = short_name(replace(widest, layers=layers), full)
            return FastShape(name, _sorted(times))
    listed = _sorted(times)
    for name, one in listed.items():
        if is_fast_enough(goal, one, best=True):
            return FastShape(name, listed, by_quartile=True)
    fastest = max(listed, key=lambda name: listed[name].speedup)
    raise GateError(
        f"no student of {teacher.source} reaches {goal}: the fastest, {fastest}, has "
        f"{listed[fastest]}",
        "nothing was trained; choose another backend, or give a narrower shape",
    )


def is_fast_enough(goal: SpeedGoal, times: UntrainedTimes, *, best: bool = False) -> bool:
    """Return whether times meet a goal. `best` takes the better quartile instead of the median."""
    if goal.speedup is not None:
        return (times.best_speedup if best else times.speedup) >= goal.speedup
    assert goal.ms is not None
    return (times.best_ms if best else times.ms) <= goal.ms


def _widths(teacher: Model) -> list[ModelShape]:
    """Return the deepest student of each width, from wide to narrow."""
    full = teacher.shape
    deepest = []
    for share in WIDTHS:
        width = int(full.hidden * share)
        ffn = round(width * full.ffn / full.hidden)
        layers = full.layers - 1 if share == 1 else max(1, full.layers - 1)
        shape = ModelShape(layers, width, ffn, full.heads)
        if layers < 1 or width != full.hidden * share or width % full.heads:
            continue
        try:
            student_config(teacher.model.config, shape)
        except UsageError:
            continue  # The architecture cannot have this width.
        deepest.append(shape)
    return deepest


def _most_layers(
    goal: SpeedGoal,
    widest: ModelShape,
    full: ModelShape,
    times: dict[str, UntrainedTimes],
    measure: Measure,
) -> int:
    """Return the largest number of layers of one width that is fast enough; 0 if none is.

    The time of a layer is nearly constant, so the next number to try lies on the line between a
    shape that is fast enough and one that is not.
    """

    def named(layers: int) -> str:
        return short_name(replace(widest, layers=layers), full)

    def time(*numbers: int) -> None:
        new = {named(n): replace(widest, layers=n) for n in numbers if named(n) not in times}
        if new:
            times.update(measure(new))

    def excess(layers: int) -> float:
        """Return the time over the goal's time, minus 1."""
        of = times[named(layers)]
        if goal.speedup is not None:
            return goal.speedup / of.speedup - 1 if of.speedup else math.inf
        assert goal.ms is not None
        return of.ms / goal.ms - 1

    fast, slow = 1, widest.layers
    time(slow, fast)
    if not is_fast_enough(goal, times[named(fast)]):
        return 0
    if is_fast_enough(goal, times[named(slow)]):
        return slow
    while slow - fast > 1:
        below, above = excess(fast), excess(slow)
        share = -below / (above - below) if math.isfinite(above) else 0.5
        guess = min(slow - 1, fast + int(share * (slow - fast)))
        time(guess, guess + 1)
        for layers in (guess + 1, guess):
            if is_fast_enough(goal, times[named(layers)]):
                fast = max(fast, layers)
                break
            slow = min(slow, layers)
    return fast


def _sorted(times: Mapping[str, UntrainedTimes]) -> dict[str, UntrainedTimes]:
    """Order shapes by width and then by layers, from large to small."""

    def size(name: str) -> tuple[int, int]:
        layers, _, rest = name.partition("x")
        return int(rest.partition(":")[0].partition("@")[0]), int(layers)

    return {name: times[name] for name in sorted(times, key=size, reverse=True)}
