"""The shapes to try, and how fast they are before any training."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kdcli.data.labelled.partition import Partition
from kdcli.deploy.latency import CELLS, Protocol, Subject
from kdcli.deploy.untrained import (
    MAX_DEPTHS,
    UNTIMED,
    Compare,
    FastShape,
    UntrainedTimes,
    choose_shape,
    min_mb,
    subject_of,
    times_of,
    times_of_shapes,
    untrained_student,
)
from kdcli.engine.device import choose_device, choose_dtype
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.models.card import describe
from kdcli.models.choose import LENGTH, SHAPE_ROWS, Comparison, mean_pooling
from kdcli.models.embedding_format import Pool, read_format
from kdcli.models.grammar import SpeedGoal, goal_of, is_static_shape, parse_shape, short_name
from kdcli.models.layout import layout_for
from kdcli.models.load import load_encoder, location
from kdcli.models.model import Model
from kdcli.models.shape import (
    evenly_spaced_layers,
    positions_of,
    shape_of_width,
    student_config,
)
from kdcli.report.text import duration
from kdcli.report.views import short
from kdcli.types import ModelShape
from kdcli.verbs.compress.limits import GoalSettings
from kdcli.verbs.compress.scored import TEACHER
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.settings import dotted
from kdcli.verbs.compress.steps import SHAPE_TIMINGS, TIMINGS
from kdcli.verbs.distill.student import check_members
from kdcli.workloads.embedder import Embedder

SEARCHED = 12 + 2 * (MAX_DEPTHS + 1)
"""The most models that the search for a fast shape usually measures: four times two shapes and the
teacher, then twice as many shapes as it compares, and the teacher."""
SHARE_OF_BUDGET = 0.1
"""The largest part of a budget in which models are timed before any training."""


class BudgetError(UsageError):
    """A budget that is too small for any candidate."""


def budget_error(search: Search, why: str, seconds: float) -> BudgetError:
    """Return the error of a budget that is too small, with a hint of at least these seconds."""
    steps, minutes = search.steps, math.ceil(seconds / 60)
    least = f"use --budget {minutes}m or more, because the candidates are trained after that"
    if steps.has_measured:
        command = steps.continuing_command(seconds)
        least = f"{least}; {steps.folder} has the timings so far: {command}"
    return BudgetError(f"--budget is too small for any candidate: {why}", least)


@dataclass(frozen=True)
class Untrained:
    """The latencies that are known before any training.

    Attributes:
        teacher: The model in torch.
        backends: The model on each backend.
        fastest: The fastest backend, on which the shapes are measured.
        shapes: The untrained shapes on the fastest backend.
        smallest: The share of the layers' weights that the smallest of these shapes has.
    """

    teacher: UntrainedTimes
    backends: dict[str, UntrainedTimes]
    fastest: str
    shapes: dict[str, UntrainedTimes]
    smallest: float = 1.0


def measure_untrained(search: Search, partition: Partition) -> Untrained:
    """Measure the model on every backend, and the untrained shapes on the fastest backend.

    Nothing is measured if nothing depends on it: one backend and one shape without a limit of speed
    or size, or a limit of size alone; see `Search.is_timed`.

    Args:
        search: The search.
        partition: The rows that choose and verify candidates. A shape for a goal is chosen on texts
            of the other rows.

    Raises:
        UsageError: A shape that cannot be made from the model, or the budget ended.
        GateError: No shape is as fast as `plan.shapes` asks for.
    """
    recipe, backends = search.recipe, search.backends
    model = str(recipe.model)
    loaded, goal = load_encoder(model), goal_of(recipe.plan.shapes or [])
    if goal is not None:
        layout_for(loaded.model.config).check_layers()
    shapes = [] if goal is not None else _listed_shapes(search, model, loaded)
    is_single = len(backends) == 1 and len(shapes) <= 1 and not search.goal.is_bounded
    if goal is None and (is_single or not search.is_timed):
        return _untimed(search, loaded, shapes)
    values = [TIMINGS, backends, search.machine]
    baseline = Subject(TEACHER, location(model))
    subjects = [subject_of(backend, location(model), backend) for backend in backends]
    total = len(subjects) + 1 + (len(shapes) + 1 if goal is None else SEARCHED)
    timing = _Timing(search, total)

    def time_backends() -> dict[str, UntrainedTimes]:
        log(f"measuring {short(model)} on {', '.join(backends)}")
        return timing.times([baseline, *subjects])

    of_backends = search.steps.once(TIMINGS, values, dict[str, UntrainedTimes], time_backends)
    fastest = min(backends, key=lambda name: of_backends.get(name, UntrainedTimes()).ms)
    card = describe(loaded.model, TEACHER, None)
    measured = {
        name: replace(of_backends[name], min_mb=min_mb(card, name, keeps_vocabulary=True))
        for name in backends
        if name in of_backends
    }
    # A resumed run does not measure them again, but their seconds count.
    timing.earlier = len(subjects) + 1
    timer = _ShapeTimer(search, partition, loaded, fastest, baseline, timing)

    def of_shapes() -> dict[str, UntrainedTimes]:
        if goal is not None:
            return timer.fastest_for(goal)
        return timer.listed(shapes, of_backends.get(fastest, UntrainedTimes()))

    named = recipe.plan.shapes or [_name(shape, loaded.shape) for shape in shapes]
    times = search.steps.once(SHAPE_TIMINGS, [*values, named], dict[str, UntrainedTimes], of_shapes)
    sizes = {_name(shape, loaded.shape): size_of_layers(shape) for shape in shapes}
    # The teacher is timed twice: next to the backends, and next to the shapes.
    timed = len(subjects) + 1 + len(times) + 1
    _skip_untimed(search, [name for name in sizes if name not in times], timed)
    least = min((size for name, size in sizes.items() if name in times), default=math.inf)
    smallest = min(1.0, least / size_of_layers(loaded.shape))
    return Untrained(of_backends[TEACHER], measured, fastest, times, smallest)


def _untimed(search: Search, loaded: Model, shapes: Sequence[ModelShape]) -> Untrained:
    """Return the sizes of the model and of the shapes. Fewer weights count as faster."""
    card = describe(loaded.model, TEACHER, None)
    backends = {
        name: replace(UNTIMED, min_mb=min_mb(card, name, keeps_vocabulary=True))
        for name in search.backends
    }
    smallest = min(backends, key=lambda name: backends[name].min_mb)
    of_shapes, shares = dict[str, UntrainedTimes](), [1.0]
    for shape in shapes:
        name = _name(shape, loaded.shape)
        card = describe(untrained_student(loaded, shape, search.recipe.seed), name, None)
        share = size_of_layers(shape) / size_of_layers(loaded.shape)
        mb = min_mb(card, smallest, keeps_vocabulary=False)
        of_shapes[name] = replace(UNTIMED, ms=share, best_ms=share, min_mb=mb)
        shares.append(share)
    return Untrained(UNTIMED, backends, smallest, of_shapes, min(shares))


@dataclass(frozen=True)
class _ShapeTimer:
    """Times untrained shapes on one backend.

    Attributes:
        search: The search.
        partition: The rows that choose and verify candidates.
        loaded: The model that the shapes are made from.
        backend: The backend.
        baseline: The model in torch.
        timing: Measures models until the budget ends.
    """

    search: Search
    partition: Partition
    loaded: Model
    backend: str
    baseline: Subject
    timing: "_Timing"

    def times(self, named: Mapping[str, ModelShape]) -> dict[str, UntrainedTimes]:
        """Return the times of shapes by name."""
        seed, measure = self.search.recipe.seed, self.timing.times
        return times_of_shapes(named, self.loaded, self.backend, self.baseline, seed, measure)

    def listed(
        self, shapes: Sequence[ModelShape], of_model: UntrainedTimes
    ) -> dict[str, UntrainedTimes]:
        """Return the times of the shapes that the budget can time.

        If all of them are too slow, the others are timed too. `of_model` is the model's own time on
        the backend.
        """
        if not shapes:
            return {}
        paid, others = shapes_to_time(self.search, self.loaded, shapes, of_model, self.timing)
        times = self.times(self._named(paid))
        if others and len(too_slow(self.search.goal, times)) == len(times):
            times |= self.times(self._named(others))
        return times

    def fastest_for(self, goal: SpeedGoal) -> dict[str, UntrainedTimes]:
        """Choose a shape for a goal of speed, and return its times."""
        chosen: FastShape = choose_shape(goal, self.loaded, self.times, self._compare)
        log(*chosen.lines(goal))
        return {chosen.name: chosen.times[chosen.name]}

    def _compare(self) -> Compare:
        """Return what compares a shape with the model while the budget lasts."""
        compared = _comparison(self.search, self.partition, self.loaded).cosine

        def within_the_budget(shape: ModelShape) -> float:
            self.timing.check_budget()
            return compared(shape)

        return within_the_budget

    def _named(self, shapes: Sequence[ModelShape]) -> dict[str, ModelShape]:
        return {_name(shape, self.loaded.shape): shape for shape in shapes}


def _skip_untimed(search: Search, untimed: Sequence[str], timed: int) -> None:
    """Skip the shapes that were not timed, and name the budget that times all.

    `timed` is the number of models that were timed.
    """
    seconds = search.steps.seconds / timed * (timed + len(untimed)) / SHARE_OF_BUDGET
    for name in untimed:
        search.skip(
            name,
            "not timed, because timing may take a tenth of --budget: "
            f"about --budget {math.ceil(seconds / 60)}m times all shapes",
        )


def shapes_to_time(
    search: Search,
    loaded: Model,
    shapes: Sequence[ModelShape],
    of_model: UntrainedTimes,
    timing: "_Timing",
) -> tuple[list[ModelShape], list[ModelShape]]:
    """Return the shapes that a tenth of the budget can time, and the others.

    The largest shapes that may meet the goal come first. The time that is expected of a shape is
    proportional to the size of its layers, which is less than it will take.
    """
    steps = search.steps
    each = steps.seconds / max(1, timing.earlier)
    paid = (SHARE_OF_BUDGET * steps.budget - steps.seconds) / each if each else math.inf
    if paid >= len(shapes):
        return list(shapes), []
    teacher = size_of_layers(loaded.shape)

    def rank(shape: ModelShape) -> tuple[bool, int]:
        share = size_of_layers(shape) / teacher
        ms, speedup = share * of_model.ms, of_model.speedup / share if share else math.inf
        expected = {_name(shape, loaded.shape): UntrainedTimes(ms, speedup, ms, speedup)}
        return bool(too_slow(search.goal, expected)), -size_of_layers(shape)

    ranked = sorted(shapes, key=rank)
    count = max(1, math.floor(paid))
    chosen = ranked[:count]
    return [shape for shape in shapes if shape in chosen], ranked[count:]


def _name(shape: ModelShape, teacher: ModelShape) -> str:
    """Name a shape without its heads, and without the feed-forward width that follows from the
    teacher's."""
    return short_name(shape, teacher).partition("@")[0]


def size_of_layers(shape: ModelShape) -> int:
    """Return the number of weights in the layers of a shape."""
    return shape.layers * shape.hidden * (4 * shape.hidden + 2 * shape.ffn)


def closest_first(search: Search, shapes: Sequence[str]) -> list[str]:
    """Return shapes by how well their cosines of pairs of texts agree with the teacher's, the
    closest first.

    Nothing is trained: each student is fitted to its teacher on a few of the training texts. Static
    shapes come last.
    """
    if len(shapes) < 2:
        return list(shapes)
    partition = Partition.read(str(search.recipe.data.partition))

    def compute() -> dict[str, float]:
        loaded = load_encoder(search.teacher)
        comparison = _comparison(search, partition, loaded)
        agreements = {}
        for name in shapes:
            if not is_static_shape(name):
                shape = parse_shape(name, loaded.shape)
                layers = evenly_spaced_layers(loaded.shape.layers, shape.layers)
                agreements[name] = comparison.agreement(shape, layers)
        found = ", ".join(f"{name} {agreement:.3f}" for name, agreement in agreements.items())
        log(f"agreement with the teacher before any training: {found}")
        return agreements

    values = [search.teacher, list(shapes)]
    agreements = search.steps.once("agreements", values, dict[str, float], compute)
    return sorted(shapes, key=lambda shape: -agreements.get(shape, -1.0))


def _comparison(search: Search, partition: Partition, loaded: Model) -> Comparison:
    """Build the comparison of untrained students with the model on the training texts.

    Raises:
        UsageError: There are too few texts.
    """
    device = choose_device(search.steps.options.device)
    # Students are compared on the CPU. If they are trained on another device, they are fitted in
    # float32 there too.
    wanted = str(dotted(search.recipe.plan.distill).get("train.dtype", "auto"))
    dtype = choose_dtype(wanted, device) if device.type == "cpu" else torch.float32
    texts, model = list(search.training_texts(partition)), str(search.recipe.model)
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
        return Comparison(loaded.model, dict(rows), mean_pooling, dtype)
    embedder = Embedder.open(model)
    tokenized = embedder.tokenize(few, ["document"] * count, length)
    batch = tokenized.batch(np.arange(count))
    return Comparison(loaded.model, batch, Pool(embedder.format), dtype)


def _listed_shapes(search: Search, model: str, loaded: Model) -> list[ModelShape]:
    """Return the shapes in `plan.shapes`, or the default shapes, the largest first; none for null.

    The default shapes have two thirds, half and a third of the teacher's layers, and half and a
    third of the layers at half the width. A model whose layers are unknown has none.

    Raises:
        UsageError: A shape that cannot be made from the model.
    """
    teacher, config = loaded.shape, loaded.model.config
    layers, width = teacher.layers, teacher.hidden
    given = search.recipe.plan.shapes
    if given is None:
        return []
    if given:
        static_width = None
        if search.make.allows_static(search.kind):
            fmt = read_format(model)
            static_width = width if fmt is None else fmt.width(width)
        shapes = [parse_shape(text, teacher, static_width=static_width) for text in given]
        for shape in shapes:
            if not shape.is_static:
                student_config(config, shape)
        if search.recipe.plan.family:
            try:
                check_members(",".join([teacher.short, *given]), [teacher, *shapes])
            except UsageError as error:
                raise error.of("plan.family", "remove plan.family, or name other shapes") from None
    elif missing := layout_for(config).missing:
        search.notes.append(f"only exports of the model itself were tried: {missing}")
        return []
    else:
        sizes = [(share, width) for share in (2 / 3, 1 / 2, 1 / 3)]
        if width % 2 == 0 and not search.recipe.plan.family:
            sizes += [(share, width // 2) for share in (1 / 2, 1 / 3)]
        possible = [
            shape_of_width(config, max(1, round(layers * share)), size) for share, size in sizes
        ]
        shapes = [shape for shape in possible if shape not in (None, teacher)]
    return sorted(dict.fromkeys(shapes), key=lambda shape: -size_of_layers(shape))


@dataclass
class _Timing:
    """Measures models until the budget ends.

    Attributes:
        search: The search.
        total: The number of models in all measurements.
        earlier: The number of models in the finished measurements.
    """

    search: Search
    total: int
    earlier: int = 0

    def times(self, subjects: Sequence[Subject]) -> dict[str, UntrainedTimes]:
        """Return the times of the subjects that gave correct output, by name.

        The first one is the teacher in torch, with which the others are compared.

        Raises:
            MachineError: The first one, with which the others are compared, could not be measured.
            UsageError: The budget ended.
        """
        measure, steps = self.search.recipe.measure, self.search.steps
        device = str(choose_device(steps.options.device))
        protocol = Protocol(device, measure.min_runs, measure.min_seconds, CELLS[:1])
        if steps.budget < math.inf:
            seconds = SHARE_OF_BUDGET * steps.budget * len(subjects) / self.total
            seconds = min(measure.min_seconds, seconds / 2)
            protocol = replace(protocol, min_seconds=seconds, max_measurements=1)
        deadline = time.monotonic() + steps.left
        latency = self.search.make.verbs.measure(subjects, protocol, deadline)
        if latency.interrupted and steps.left > 0:
            raise KeyboardInterrupt
        if latency.interrupted:
            raise self._stopped(self.earlier + latency.prepared)
        self.earlier += len(subjects)
        return times_of(subjects, latency)

    def check_budget(self) -> None:
        """Raise a BudgetError if the budget ended."""
        if self.search.steps.left <= 0:
            raise self._stopped(self.earlier)

    def _stopped(self, measured: int) -> BudgetError:
        """Return the error of a budget that ended after this number of models."""
        measured = max(1, measured)
        seconds = self.search.steps.seconds / measured * max(measured, self.total)
        took = duration(seconds)
        why = f"it ended while models were timed and compared, which takes about {took} in all"
        return budget_error(self.search, why, 2 * seconds)


def too_slow(goal: GoalSettings, shapes: Mapping[str, UntrainedTimes]) -> dict[str, str]:
    """Return the shapes that cannot meet the goal, with the reasons.

    The medians decide. If they leave no shape, the better quartiles decide, because a busy machine
    slows short calls most.
    """
    slow = goal.untrained_whys(shapes)
    return slow if len(slow) < len(shapes) else goal.untrained_whys(shapes, best=True)
