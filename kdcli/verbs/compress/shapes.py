"""The shapes to try, and how fast they are before any training."""

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kdcli.deploy.latency import CELLS, Protocol, Subject, measure_latency
from kdcli.disk import as_directory
from kdcli.engine.device import choose_device
from kdcli.engine.progress import Progress
from kdcli.errors import MachineError
from kdcli.models.card import describe
from kdcli.models.grammar import parse_shape
from kdcli.models.load import load_encoder, location, save_model
from kdcli.models.model import Model
from kdcli.models.shape import build_student, shape_of
from kdcli.models.training_rows import NO_ROWS
from kdcli.report.views import short
from kdcli.types import ModelShape
from kdcli.verbs.compress.budget import TIMED, timing_stopped
from kdcli.verbs.compress.judge import LIMITS, is_bounded
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.search import TEACHER, Search
from kdcli.verbs.compress.settings import GoalSettings


@dataclass(frozen=True)
class UntrainedTimes:
    """How fast a model is on one sequence of 128 tokens, compared with torch in float32.

    Attributes:
        ms, speedup: the medians.
        best_ms, best_speedup: the better quartile. Other load on the machine slows the median more.
        layers_mb: megabytes of the layers in int8, of a shape.
    """

    ms: float = math.inf
    speedup: float = 0.0
    best_ms: float = math.inf
    best_speedup: float = 0.0
    layers_mb: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the model gave correct output on the backend, so that it could be measured."""
        return self.ms < math.inf


UNTIMED = UntrainedTimes(0.0, 1.0, 0.0, 1.0)
"""Times that were not measured, because nothing depends on them."""


@dataclass(frozen=True)
class Untrained:
    """The latencies that are known before any training.

    Attributes:
        teacher: The model in torch.
        backends: The model on each backend.
        fastest: The fastest backend, on which the shapes are measured.
        shapes: The untrained shapes on the fastest backend.
    """

    teacher: UntrainedTimes
    backends: dict[str, UntrainedTimes]
    fastest: str
    shapes: dict[str, UntrainedTimes]


def measure_untrained(search: Search, model: str) -> Untrained:
    """Measure the model on every backend, and the untrained shapes on the fastest backend.

    Nothing is measured if nothing depends on it: one backend, one shape, no limit of speed or size.
    The journal keeps both measurements.

    Raises UsageError: a shape that cannot be made from the model, or the budget ended.
    """
    runner = search.runner
    trusted = runner.options.trust_remote_code
    loaded = load_encoder(model, trust_remote_code=trusted)
    shapes = shapes_of(
        runner.recipe.plan.shapes,
        shape_of(loaded.model.config),
        allow_static=runner.trainer.learns_vectors,
    )
    if len(search.backends) == 1 and len(shapes) == 1 and not is_bounded(search.goal):
        backend = search.backends[0]
        build_student(loaded.model, shapes[0], init="random", seed=runner.recipe.seed)
        return Untrained(UNTIMED, {backend: UNTIMED}, backend, {str_of(shapes[0]): UNTIMED})
    measure = runner.recipe.measure
    protocol = Protocol(
        str(choose_device(runner.options.device)),
        measure.min_runs,
        measure.min_seconds,
        CELLS[:1],
        trust_remote_code=trusted,
    )
    baseline = Subject(TEACHER, location(model))
    subjects = [_subject(backend, location(model), backend) for backend in search.backends]
    timing = _Timing(runner, protocol, len(subjects) + len(shapes) + 2)
    times = runner.journal.once(
        f"{TIMED}backends",
        dict[str, UntrainedTimes],
        lambda: timing.times(
            [baseline, *subjects], f"{short(model)} on {', '.join(search.backends)}"
        ),
    )
    fastest = min(search.backends, key=lambda name: times.get(name, UntrainedTimes()).ms)
    backends = {name: times[name] for name in search.backends if name in times}
    timing.earlier = len(subjects) + 1
    shape_times = runner.journal.once(
        f"{TIMED}shapes",
        dict[str, UntrainedTimes],
        lambda: _times_of_shapes(shapes, loaded, fastest, baseline, timing),
    )
    return Untrained(times[TEACHER], backends, fastest, shape_times)


@dataclass
class _Timing:
    """Measures models until the budget ends.

    Attributes:
        runner: the runner of the compression.
        protocol: how to measure.
        total: the number of models in all measurements.
        earlier: the number of models in the finished measurements.
    """

    runner: StepRunner
    protocol: Protocol
    total: int
    earlier: int = 0

    def times(self, subjects: Sequence[Subject], names: str) -> dict[str, UntrainedTimes]:
        """Return the times of the subjects that gave correct output, by name.

        Args:
            subjects: the teacher in torch, and the models that are compared with it.
            names: what is measured, for the log.

        Raises:
            MachineError: the first one, with which the others are compared, could not be measured.
            UsageError: the budget ended.
        """
        Progress.log(f"measuring {names}")
        began, journal = time.monotonic(), self.runner.journal
        deadline = began + journal.left
        latency = measure_latency(subjects, self.protocol, deadline=deadline)
        if latency.interrupted and time.monotonic() < deadline:
            raise KeyboardInterrupt
        if latency.interrupted:
            spent = journal.seconds + time.monotonic() - began
            prepared = max(1, self.earlier + latency.prepared)
            raise timing_stopped(self.runner, spent / prepared * self.total)
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


def _times_of_shapes(
    shapes: Sequence[ModelShape],
    teacher: Model,
    backend: str,
    baseline: Subject,
    timing: _Timing,
) -> dict[str, UntrainedTimes]:
    """Measure students with random weights on a backend."""
    subjects, layers_mb = [baseline], {}
    with tempfile.TemporaryDirectory() as temporary:
        for shape in shapes:
            name = str_of(shape)
            seed = timing.runner.recipe.seed
            student = build_student(teacher.model, shape, init="random", seed=seed).model
            folder = Path(temporary) / as_directory(name)
            save_model(student, teacher.tokenizer, folder, NO_ROWS)
            subjects.append(_subject(name, str(folder), backend))
            layers_mb[name] = describe(student, name, None).params_transformer / 1e6
        times = timing.times(subjects, f"{', '.join(layers_mb)} untrained on {backend}")
    measured = {name: times.get(name, UntrainedTimes()) for name in layers_mb}
    return {
        name: UntrainedTimes(of.ms, of.speedup, of.best_ms, of.best_speedup, layers_mb[name])
        for name, of in measured.items()
    }


def _subject(name: str, source: str, backend: str) -> Subject:
    engine, _, precision = backend.partition("-")
    return Subject(name, source, engine, precision or "fp32")


def shapes_of(
    given: Sequence[str], teacher: ModelShape, *, allow_static: bool = False
) -> list[ModelShape]:
    """Return the shapes to try, from large to small.

    Unless they are given, these have two thirds, half and a third of the teacher's layers, and half
    and a third of the layers at half the width.
    """
    layers, width = teacher.layers, teacher.hidden
    if given:
        shapes = [parse_shape(text, teacher, allow_static=allow_static) for text in given]
    else:
        texts = [f"{max(1, round(layers * share))}x{width}" for share in (2 / 3, 1 / 2, 1 / 3)]
        if width % (2 * teacher.heads) == 0:
            texts += [f"{max(1, round(layers * share))}x{width // 2}" for share in (1 / 2, 1 / 3)]
        shapes = [shape for text in texts if (shape := parse_shape(text, teacher)) != teacher]
    size = {
        shape: shape.layers * shape.hidden * (4 * shape.hidden + 2 * shape.ffn) for shape in shapes
    }
    return sorted(size, key=lambda shape: -size[shape])


def str_of(shape: ModelShape) -> str:
    """Return `3x384`, or `3x384:600` if the feed-forward width is not four times the width."""
    if shape.is_static:
        return str(shape)
    ffn = "" if shape.ffn == 4 * shape.hidden else f":{shape.ffn}"
    return f"{shape.layers}x{shape.hidden}{ffn}"


def missed_untrained(
    goal: GoalSettings, times: UntrainedTimes, *, best: bool = False
) -> dict[str, str]:
    """Return why a shape misses the limits whatever it learns, by limit.

    `best` takes the better quartile of its times instead of the medians.
    """
    if not times.measured:
        return dict.fromkeys(LIMITS, "it gave wrong output on the backend and was not measured")
    missed = {}
    ms = times.best_ms if best else times.ms
    speedup = times.best_speedup if best else times.speedup
    if goal.speedup is not None and speedup < goal.speedup:
        missed["speedup"] = f"untrained it is {speedup:.1f} times as fast, not {goal.speedup:g}"
    if goal.max_latency_ms is not None and ms > goal.max_latency_ms:
        limit = goal.max_latency_ms
        missed["max_latency_ms"] = f"untrained it takes {ms:.2f} ms, more than {limit:g}"
    if goal.max_mb is not None and times.layers_mb > goal.max_mb:
        size = f"{times.layers_mb:.1f} MB in int8"
        missed["max_mb"] = f"its layers alone take {size}, more than {goal.max_mb:g}"
    return missed


def too_slow(goal: GoalSettings, shapes: Mapping[str, UntrainedTimes]) -> dict[str, str]:
    """Return the shapes that cannot meet the goal, with the reasons.

    The medians decide. If they leave no shape, the better quartiles decide, because a busy machine
    slows short calls most.
    """
    missed = {name: missed_untrained(goal, times) for name, times in shapes.items()}
    if all(missed.values()):
        missed = {name: missed_untrained(goal, times, best=True) for name, times in shapes.items()}
    return {name: "; ".join(dict.fromkeys(whys.values())) for name, whys in missed.items() if whys}
