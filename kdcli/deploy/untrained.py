"""Measure how fast students are before any training, and choose one that is fast enough.

Latency depends on a student's shape and not on its weights, so students with random weights are
measured. All times are of one sequence of 128 tokens, next to the teacher in torch in float32.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from kdcli.deploy.latency import Latency, Protocol, Subject, measure_latency
from kdcli.disk import as_directory
from kdcli.errors import GateError, Interrupted, MachineError, UsageError
from kdcli.messages import log
from kdcli.models.card import describe
from kdcli.models.grammar import SpeedGoal, short_name
from kdcli.models.load import save_model
from kdcli.models.model import NO_ROWS, Model
from kdcli.models.shape import build_student, shape_of_width
from kdcli.types import Card, ModelShape, Start

WIDTHS = (1.0, 0.75, 0.5)
"""Shares of the teacher's width that a student may have, in the order in which they are tried."""
FFN_STEPS, MIN_FFN_STEPS = 24, 3
"""The feed-forward widths that are tried are multiples of about 1/24 of the whole width, from 3."""
ALIGNED = 8
"""Wide layers have a multiple of this number of units."""
MAX_DEPTHS = 3
"""How many more layers are tried with fewer feed-forward units."""
MARGIN = 0.02
"""How much faster than the goal a student should be that was too slow when it was measured."""
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int8-packed": 0.5, "q4": 0.5}
"""Bytes that a parameter takes at least, by the precision of a backend."""


@dataclass(frozen=True)
class UntrainedTimes:
    """How fast a model is on one sequence of 128 tokens, compared with torch in float32.

    Attributes:
        ms, speedup: The medians.
        best_ms, best_speedup: The better quartile. Other load on the machine slows the median more.
        min_mb: A lower bound on the size of its weights, in megabytes; see the function `min_mb`.
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

    def load(self, goal: SpeedGoal, *, best: bool = False) -> float:
        """Return the time relative to the time of a goal: up to 1, the model is fast enough.

        `best` takes the better quartile instead of the median.
        """
        if goal.ms is not None:
            return (self.best_ms if best else self.ms) / goal.ms
        assert goal.speedup is not None
        speedup = self.best_speedup if best else self.speedup
        return goal.speedup / speedup if speedup else math.inf

    def __str__(self) -> str:
        """Return `2.31x, 8.20 ms`."""
        return f"{self.speedup:.2f}x, {self.ms:.2f} ms" if self.measured else "not measured"


UNTIMED = UntrainedTimes(0.0, 1.0, 0.0, 1.0)
"""Times that were not measured, because nothing depends on them."""

Measure = Callable[[Mapping[str, ModelShape]], Mapping[str, UntrainedTimes]]
"""Measures untrained students by name."""
Compare = Callable[[ModelShape], float]
"""Returns the mean cosine between the vectors of an untrained student and of its teacher."""
QUARTILE = "the medians left no shape, because the machine was busy: the better quartiles decided"
"""The message when the better quartiles chose the shape."""
BEST = "is closest to the teacher among the candidates that are fast enough"
MOST = "has the most layers of the widest students that are fast enough"


@dataclass(frozen=True)
class FastShape:
    """The shape that was chosen for a goal, and what was measured.

    Attributes:
        name: The shape.
        times: Every shape that was measured, from large to small.
        cosines: The candidates' mean cosine with the teacher. Empty if there was only one.
        by_quartile: Whether the better quartiles of the times decided, because the medians left
            no shape.
    """

    name: str
    times: Mapping[str, UntrainedTimes]
    cosines: Mapping[str, float] = field(default_factory=dict)
    by_quartile: bool = False

    @property
    def why(self) -> str:
        """Why the shape was chosen, such as `is fast enough`."""
        if self.by_quartile:
            return "is fast enough"
        return BEST if self.cosines else MOST

    def lines(self, goal: SpeedGoal) -> list[str]:
        """Return the choice for the log."""
        return [f"{goal}: {self.name} {self.why}", *([QUARTILE] if self.by_quartile else [])]

    @property
    def measured(self) -> list[str]:
        """The measurements of each shape, such as `3x384: 2.31x, 8.20 ms, cosine 0.775`."""
        lines = []
        for name, times in self.times.items():
            cosine = self.cosines.get(name)
            added = "" if cosine is None else f", cosine {cosine:.3f}"
            lines.append(f"{name}: {times}{added}")
        return [*lines, QUARTILE] if self.by_quartile else lines


def measured_times(subjects: Sequence[Subject], protocol: Protocol) -> dict[str, UntrainedTimes]:
    """Measure models, and return the times by name. Wrong output has no times.

    Raises:
        MachineError: The first one, with which the others are compared, could not be measured;
            Interrupted: Ctrl-C.
    """
    latency = measure_latency(subjects, protocol)
    if latency.interrupted:
        raise Interrupted("stopped before anything was written")
    return times_of(subjects, latency)


def times_of(subjects: Sequence[Subject], latency: Latency) -> dict[str, UntrainedTimes]:
    """Return the measured times by name.

    Raises:
        MachineError: The first subject, with which the others are compared, has no times.
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

    Raises:
        UsageError: The teacher has no student of this shape.
    """
    return build_student(teacher.model, shape, Start(init="random", seed=seed)).model


def times_of_shapes(
    shapes: Mapping[str, ModelShape],
    teacher: Model,
    backend: str,
    baseline: Subject,
    seed: int,
    times: Callable[[Sequence[Subject]], Mapping[str, UntrainedTimes]],
) -> dict[str, UntrainedTimes]:
    """Measure students of a teacher with random weights on a backend, by name.

    This is the only place that times shapes, for `distill --to 2x` and for `compress`.

    Args:
        shapes: The students.
        teacher: Their teacher.
        backend: Such as `torch` or `onnx-int8`.
        baseline: The teacher in torch, with which they are compared.
        seed: The seed of their weights.
        times: Measures models. The first one is the baseline.
    """
    log(f"measuring {', '.join(shapes)} untrained on {backend}")
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


def choose_shape(
    goal: SpeedGoal, teacher: Model, measure: Measure, comparison: Callable[[], Compare]
) -> FastShape:
    """Choose the student that is closest to its teacher among the candidates fast enough.

    One candidate is the student with the most layers of the teacher's width. If even one layer is
    too slow, it has three quarters of the width, and then half of it. The other candidates have
    up to `MAX_DEPTHS` more layers, with fewer feed-forward units.

    Few shapes are measured, because the time is nearly linear in the layers and in their units. The
    medians decide. If they leave no shape, the better quartiles decide, because a busy machine
    slows short calls most.

    Args:
        goal: The goal.
        teacher: The model that the student is made from.
        measure: Measures untrained students.
        comparison: Makes what compares untrained students with the teacher. It is only called if
            there are several candidates.

    Raises:
        UsageError: The teacher has no smaller student, or there is too little text to compare
            students.
        GateError: No student is fast enough.
    """
    full, timed = teacher.shape, _Timed(goal, teacher.shape, measure)
    shapes = list(_widths(teacher))
    if not shapes:
        raise UsageError(
            f"{teacher.source} ({full}) has no smaller student to choose from",
            "give a shape LxH instead of a goal",
        )
    for widest in shapes:
        layers = _most_layers(timed, widest)
        if not layers:
            continue
        most = replace(widest, layers=layers)
        candidates = {timed.name(shape): shape for shape in (most, *_deeper(timed, most))}
        if len(candidates) == 1:
            return FastShape(timed.name(most), timed.sorted())
        compare, cosines = comparison(), dict[str, float]()
        for name, shape in candidates.items():
            cosines[name] = compare(shape)
            log(f"{name}: mean cosine {cosines[name]:.3f} with the teacher after the fit")
        best = max(cosines, key=cosines.__getitem__)
        return FastShape(best, timed.sorted(), cosines)
    listed = timed.sorted()
    for name, one in listed.items():
        if one.load(goal, best=True) <= 1:
            return FastShape(name, listed, by_quartile=True)
    fastest = max(listed, key=lambda name: listed[name].speedup)
    raise GateError(
        f"no student of {teacher.source} reaches {goal}: the fastest, {fastest}, has "
        f"{listed[fastest]}",
        "nothing was trained; choose another backend, or give a narrower shape",
    )


def _widths(teacher: Model) -> list[ModelShape]:
    """Return the deepest student of each width, from wide to narrow."""
    full = teacher.shape
    deepest = []
    for share in WIDTHS:
        width = int(full.hidden * share)
        layers = full.layers - 1 if share == 1 else max(1, full.layers - 1)
        if layers < 1 or width != full.hidden * share:
            continue
        shape = shape_of_width(teacher.model.config, layers, width)
        if shape is not None:
            deepest.append(shape)
    return deepest


@dataclass
class _Timed:
    """The shapes that were measured for a goal.

    Attributes:
        goal: The goal.
        full: The teacher's shape.
        measure: Measures untrained students.
        times: The measured times by name.
    """

    goal: SpeedGoal
    full: ModelShape
    measure: Measure
    shapes: dict[str, ModelShape] = field(default_factory=dict)
    times: dict[str, UntrainedTimes] = field(default_factory=dict)

    def name(self, shape: ModelShape) -> str:
        """Return the short name of a student."""
        return short_name(shape, self.full)

    def time(self, *shapes: ModelShape) -> None:
        """Measure the shapes that were not measured before, in turns."""
        new = {name: one for one in shapes if (name := self.name(one)) not in self.times}
        if new:
            self.times.update(self.measure(new))
            self.shapes.update(new)

    def is_fast(self, shape: ModelShape) -> bool:
        """Return whether a measured shape meets the goal."""
        return self.load(shape) <= 1

    def load(self, shape: ModelShape) -> float:
        """Return the time of a measured shape, relative to the time of the goal."""
        return self.times[self.name(shape)].load(self.goal)

    def sorted(self) -> dict[str, UntrainedTimes]:
        """Return the times, ordered by width, layers and units from large to small."""
        sizes = {name: (one.hidden, one.layers, one.ffn) for name, one in self.shapes.items()}
        order = sorted(sizes, key=sizes.__getitem__, reverse=True)
        return {name: self.times[name] for name in order}


def _most_layers(timed: _Timed, widest: ModelShape) -> int:
    """Return the largest number of layers of one width that is fast enough; 0 if none is.

    The time of a layer is nearly constant, so the next number to try lies on the line between a
    shape that is fast enough and one that is not.
    """

    def of(layers: int) -> ModelShape:
        return replace(widest, layers=layers)

    fast, slow = 1, widest.layers
    timed.time(of(slow), of(fast))
    if not timed.is_fast(of(fast)):
        return 0
    if timed.is_fast(of(slow)):
        return slow
    while slow - fast > 1:
        below, above = timed.load(of(fast)) - 1, timed.load(of(slow)) - 1
        share = -below / (above - below) if math.isfinite(above) else 0.5
        guess = min(slow - 1, fast + int(share * (slow - fast)))
        timed.time(of(guess), of(guess + 1))
        for layers in (guess + 1, guess):
            if timed.is_fast(of(layers)):
                fast = max(fast, layers)
                break
            slow = min(slow, layers)
    return fast


def _deeper(timed: _Timed, most: ModelShape) -> list[ModelShape]:
    """Return students with more layers than `most` and fewer units that are fast enough.

    The times that are known tell how many units a depth can have. A student that is too slow after
    all is measured once more with fewer units.
    """
    step = max(1, most.ffn // FFN_STEPS)
    if step > ALIGNED:
        step -= step % ALIGNED
    narrowest = replace(most, ffn=MIN_FFN_STEPS * step)
    depths = range(most.layers + 1, timed.full.layers + 1)
    if not depths or narrowest.ffn >= most.ffn:
        return []
    timed.time(narrowest, replace(narrowest, layers=depths[-1]))
    fixed, layer, unit = _costs(timed, most.hidden)
    if unit <= 0:
        return []  # The noise is larger than the cost of the units.

    def fitting(layers: int) -> ModelShape:
        units = ((1 - fixed) / layers - layer) / unit
        below = min(most.ffn - 1, int(units))
        return replace(most, layers=layers, ffn=below // step * step)

    nearest = map(fitting, depths[:MAX_DEPTHS])
    allowed = [shape for shape in nearest if shape.ffn >= narrowest.ffn]
    timed.time(*allowed)

    def narrower(shape: ModelShape) -> ModelShape:
        if timed.is_fast(shape) or not math.isfinite(timed.load(shape)):
            return shape
        excess = (timed.load(shape) - 1 + MARGIN) / (shape.layers * unit)
        return replace(shape, ffn=max(narrowest.ffn, shape.ffn - math.ceil(excess / step) * step))

    tried = [narrower(shape) for shape in allowed]
    timed.time(*tried)
    return [shape for shape in tried if timed.is_fast(shape)]


def _costs(timed: _Timed, width: int) -> tuple[float, float, float]:
    """Return the fixed time, the time of a layer without units, and the time of one unit.

    The three costs are fitted by least squares to the measured shapes of one width. They are
    relative to the time of the goal.
    """
    shapes = [
        shape
        for shape in timed.shapes.values()
        if shape.hidden == width and math.isfinite(timed.load(shape))
    ]
    parts = np.array([(1, shape.layers, shape.layers * shape.ffn) for shape in shapes], float)
    # Units count in hundreds or thousands, so the columns are scaled before they are solved.
    scale = np.abs(parts).max(0)
    loads = np.array([timed.load(shape) for shape in shapes])
    fixed, layer, unit = np.linalg.lstsq(parts / scale, loads, rcond=None)[0] / scale
    return float(fixed), float(layer), float(unit)
