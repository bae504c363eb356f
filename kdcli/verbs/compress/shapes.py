"""The shapes to try, and how fast they are before any training."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kdcli.data.labelled.partition import Partition
from kdcli.deploy.latency import CELLS, Protocol, Subject
from kdcli.deploy.untrained import (
    MAX_DEPTHS,
    QUARTILE,
    UNTIMED,
    Compare,
    UntrainedTimes,
    choose_shape,
    min_mb,
    subject_of,
    times_of,
    times_of_shapes,
    untrained_student,
)
from kdcli.disk import cache_key
from kdcli.engine.device import choose_device, choose_dtype
from kdcli.engine.progress import Progress
from kdcli.models.card import describe
from kdcli.models.choose import LENGTH, SHAPE_ROWS, Comparison, mean_pooling
from kdcli.models.embedder import Pool, read_format
from kdcli.models.grammar import SpeedGoal, goal_of, parse_shape
from kdcli.models.load import load_encoder, location
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.report.views import short
from kdcli.types import ModelShape
from kdcli.verbs.compress.budget import TIMED, BudgetError, timing_stopped
from kdcli.verbs.compress.choice import LIMITS, is_bounded
from kdcli.verbs.compress.judge import TEACHER
from kdcli.verbs.compress.recipes import dotted
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.settings import GoalSettings
from kdcli.workloads.embedder import Embedder

SEARCHED = 12 + 2 * (MAX_DEPTHS + 1)
"""The most models that the search for a fast shape usually measures: four times two shapes and the
teacher, then twice as many shapes as it compares, and the teacher."""


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


def measure_untrained(search: Search, model: str, partition: Partition) -> Untrained:
    """Measure the model on every backend, and the untrained shapes on the fastest backend.

    Nothing is measured if nothing depends on it: one backend, one shape, no limit of speed or size.

    Args:
        search: The search.
        model: The model that is compressed.
        partition: The rows that choose and verify candidates. A shape for a goal is chosen on texts
            of the other rows.

    Raises UsageError: a shape that cannot be made from the model, or the budget ended.
    Raises GateError: no shape is as fast as `plan.shapes` asks for.
    """
    runner = search.runner
    loaded = load_encoder(model)
    goal = goal_of(runner.recipe.plan.shapes)
    shapes = [] if goal is not None else _listed_shapes(runner, model, loaded)
    if len(search.backends) == 1 and len(shapes) == 1 and not is_bounded(search.goal):
        backend = search.backends[0]
        untrained_student(loaded, shapes[0], runner.recipe.seed)
        return Untrained(UNTIMED, {backend: UNTIMED}, backend, {shapes[0].short: UNTIMED})
    measure = runner.recipe.measure
    protocol = Protocol(
        str(choose_device(runner.options.device)),
        measure.min_runs,
        measure.min_seconds,
        CELLS[:1],
    )
    baseline = Subject(TEACHER, location(model))
    subjects = [subject_of(backend, location(model), backend) for backend in search.backends]
    for_shapes = len(shapes) + 1 if goal is None else SEARCHED
    timing = _Timing(runner, protocol, len(subjects) + 1 + for_shapes)
    place = cache_key(search.backends, runner.place)[:8]
    times = runner.journal.once(
        f"{TIMED}backends {place}",
        dict[str, UntrainedTimes],
        lambda: timing.times(
            [baseline, *subjects], f"{short(model)} on {', '.join(search.backends)}"
        ),
    )
    fastest = min(search.backends, key=lambda name: times.get(name, UntrainedTimes()).ms)
    card = describe(loaded.model, TEACHER, None)
    backends = {
        name: replace(times[name], min_mb=min_mb(card, name, keeps_vocabulary=True))
        for name in search.backends
        if name in times
    }
    # A resumed run does not measure them again.
    timing.earlier = len(subjects) + 1
    untrained = _UntrainedShapes(timing, model, loaded, baseline, fastest, partition)
    shape_times = runner.journal.once(
        f"{TIMED}shapes {place}",
        dict[str, UntrainedTimes],
        lambda: (
            untrained.measure({shape.short: shape for shape in shapes})
            if goal is None
            else untrained.choose(goal)
        ),
    )
    return Untrained(times[TEACHER], backends, fastest, shape_times)


@dataclass(frozen=True)
class _UntrainedShapes:
    """The untrained shapes of a compression.

    Attributes:
        timing: measures them.
        model: where the model was loaded from.
        loaded: the model that they are made from.
        baseline: the model in torch, with which they are measured.
        backend: where they are measured.
        partition: the rows on which they are not compared.
    """

    timing: "_Timing"
    model: str
    loaded: Model
    baseline: Subject
    backend: str
    partition: Partition

    def measure(self, named: Mapping[str, ModelShape]) -> dict[str, UntrainedTimes]:
        """Return the times of shapes by name."""
        names = f"{', '.join(named)} untrained on {self.backend}"
        return times_of_shapes(
            named,
            self.loaded,
            self.backend,
            self.baseline,
            self.timing.runner.recipe.seed,
            lambda subjects: self.timing.times(subjects, names),
        )

    def choose(self, goal: SpeedGoal) -> dict[str, UntrainedTimes]:
        """Choose a shape for a goal, and return its name and times."""
        chosen = choose_shape(goal, self.loaded, self.measure, self._comparison)
        Progress.log(f"{goal}: {chosen.name} {chosen.why}")
        if chosen.by_quartile:
            Progress.log(QUARTILE)
        return {chosen.name: chosen.times[chosen.name]}

    def _comparison(self) -> Compare:
        """Build the comparison with the model, which the budget may end."""
        runner = self.timing.runner
        options, training = runner.options, dotted(runner.recipe.plan.distill)
        device = choose_device(options.device)
        # Students are compared on the CPU. If they are trained on another device, they are fitted
        # in float32 there too.
        wanted = str(training.get("train.dtype", "auto"))
        compare = compare_on(
            runner.training_texts(self.partition),
            self.loaded,
            self.model,
            choose_dtype(wanted, device) if device.type == "cpu" else torch.float32,
        )

        def compare_in_time(shape: ModelShape) -> float:
            self.timing.check_budget()
            return compare(shape)

        return compare_in_time


def _listed_shapes(runner: StepRunner, model: str, loaded: Model) -> list[ModelShape]:
    """Return the shapes in `plan.shapes`, or the shapes that are tried if it is empty.

    Raises UsageError: a shape that cannot be made from the model.
    """
    static_width = None
    if runner.trainer.allows_static(runner.kind):
        fmt, hidden = read_format(model), loaded.shape.hidden
        static_width = hidden if fmt is None else fmt.width(hidden)
    return shapes_of(runner.recipe.plan.shapes, loaded.shape, static_width=static_width)


def compare_on(
    texts: Sequence[str],
    loaded: Model,
    model: str,
    dtype: torch.dtype,
) -> Compare:
    """Build the comparison of untrained students with a model on texts.

    Args:
        texts: The texts.
        loaded: The model's encoder and tokenizer.
        model: Where the model was loaded from.
        dtype: The number format in which the models run while students are fitted.

    Raises UsageError: there are too few texts.
    """
    count = min(SHAPE_ROWS, len(texts))
    few = [texts[n * len(texts) // count] for n in range(count)]
    length = min(LENGTH, positions_of(loaded.model.config) or LENGTH)
    if read_format(model) is None:
        rows = loaded.tokenizer(
            few,
            padding=True,
            truncation=True,
            max_length=length,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        return Comparison(loaded.model, dict(rows), mean_pooling, dtype).cosine
    embedder = Embedder.open(model)
    tokenized = embedder.tokenize(few, ["document"] * count, length)
    batch = tokenized.batch(np.arange(count))
    return Comparison(loaded.model, batch, Pool(embedder.format), dtype).cosine


@dataclass
class _Timing:
    """Measures models until the budget ends. The budget runs from the creation of this object.

    Attributes:
        runner: the runner of the compression.
        protocol: how to measure.
        total: the number of models in all measurements.
        earlier: the number of models in the finished measurements.
        deadline: when the budget ends, as `time.monotonic()`.
        began: when it would have begun if all of its seconds had been spent without a break.
    """

    runner: StepRunner
    protocol: Protocol
    total: int
    earlier: int = 0

    def __post_init__(self) -> None:
        # The journal does not count the seconds of a step before its end.
        journal, now = self.runner.journal, time.monotonic()
        self.deadline, self.began = now + journal.left, now - journal.seconds

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
        latency = self.runner.verbs.measure(subjects, self.protocol, deadline=self.deadline)
        if latency.interrupted and time.monotonic() < self.deadline:
            raise KeyboardInterrupt
        if latency.interrupted:
            raise self._stopped(self.earlier + latency.prepared)
        self.earlier += len(subjects)
        return times_of(subjects, latency)

    def check_budget(self) -> None:
        """Raise a BudgetError if the budget ended."""
        if time.monotonic() >= self.deadline:
            raise self._stopped(self.earlier)

    def _stopped(self, measured: int) -> BudgetError:
        """Return the error of a budget that ended after this number of models."""
        spent, measured = time.monotonic() - self.began, max(1, measured)
        return timing_stopped(self.runner, spent / measured * max(measured, self.total))


def shapes_of(
    given: Sequence[str], teacher: ModelShape, *, static_width: int | None = None
) -> list[ModelShape]:
    """Return the shapes to try, from large to small.

    Unless they are given, these have two thirds, half and a third of the teacher's layers, and half
    and a third of the layers at half the width.
    """
    layers, width = teacher.layers, teacher.hidden
    if given:
        shapes = [parse_shape(text, teacher, static_width=static_width) for text in given]
    else:
        texts = [f"{max(1, round(layers * share))}x{width}" for share in (2 / 3, 1 / 2, 1 / 3)]
        if width % (2 * teacher.heads) == 0:
            texts += [f"{max(1, round(layers * share))}x{width // 2}" for share in (1 / 2, 1 / 3)]
        shapes = [shape for text in texts if (shape := parse_shape(text, teacher)) != teacher]
    size = {
        shape: shape.layers * shape.hidden * (4 * shape.hidden + 2 * shape.ffn) for shape in shapes
    }
    return sorted(size, key=lambda shape: -size[shape])


def missed_untrained(
    goal: GoalSettings, times: UntrainedTimes, *, best: bool = False, is_shape: bool = True
) -> dict[str, str]:
    """Return why a shape misses the limits whatever it learns, by limit.

    Args:
        goal: the limits.
        times: the latencies of the shape, or of the given model on a backend.
        best: whether the better quartiles decide instead of the medians.
        is_shape: whether the latencies are a shape's.
    """
    if not times.measured:
        return dict.fromkeys(LIMITS, "it gave wrong output on the backend and was not measured")
    missed = {}
    subject, there = ("even untrained, it", "") if is_shape else ("the model itself", " on it")
    ms = times.best_ms if best else times.ms
    speedup = times.best_speedup if best else times.speedup
    if goal.speedup is not None and speedup < goal.speedup:
        fast = f"{subject} is only {speedup:.1f} times as fast{there}"
        missed["speedup"] = f"{fast}; the goal is {goal.speedup:g}"
    if goal.max_latency_ms is not None and ms > goal.max_latency_ms:
        slow = f"{subject} takes {ms:.2f} ms{there}"
        missed["max_latency_ms"] = f"{slow}; the goal is {goal.max_latency_ms:g}"
    if goal.max_mb is not None and times.min_mb > goal.max_mb:
        what = "its layers alone take" if is_shape else "the model itself takes"
        size = f"at least {times.min_mb:.1f} MB"
        missed["max_mb"] = f"{what} {size}, more than {goal.max_mb:g}"
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
