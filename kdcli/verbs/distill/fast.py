"""Choose the student's shape for a goal: `--to 2x` or `--to 5ms`."""

from collections.abc import Mapping
from dataclasses import replace

from kdcli.deploy.latency import CELLS, Protocol, Subject
from kdcli.deploy.untrained import (
    Compare,
    UntrainedTimes,
    choose_shape,
    measured_times,
    subject_of,
    times_of_shapes,
)
from kdcli.disk import RECIPE_FILE
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.models.choose import SHAPE_ROWS, check_rows
from kdcli.models.grammar import SpeedGoal, goal_of, is_family
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.recipe.resolve import Resolved, resolve
from kdcli.report.schema import TEACHER
from kdcli.report.text import card_shape, short
from kdcli.run.context import RunContext
from kdcli.types import Card, ModelShape
from kdcli.verbs.distill.settings import DistillRecipe, StudentSettings
from kdcli.workloads.settings import ChosenShape
from kdcli.workloads.workload import Workload

MIN_RUNS, MIN_SECONDS = 30, 3.0
"""The most that `measure.min_runs` and `measure.min_seconds` ask for when a shape is chosen.

A few percent decide little, so it needs less precision than a report.
"""


def with_shape(
    context: RunContext[DistillRecipe], workload: Workload, origin: Model
) -> RunContext[DistillRecipe]:
    """Replace a goal in `student.to` by the shape that `choose_shape` chooses for it.

    A run that is resumed keeps its shape, and nothing is timed. A recipe with a shape is returned
    as it is.

    Args:
        context: The run.
        workload: The texts on which students are compared with the model they are made from.
        origin: The model that the student is made from.

    Raises:
        UsageError: The teacher meets the goal as it is, or there are too few texts.
        GateError: No student is fast enough.
    """
    goal = goal_of(context.recipe.student.to)
    if goal is None:
        return context
    assert workload.sample is not None, "a distillation has texts"
    check_rows(len(workload.sample))
    chosen = context.session.on_main(
        lambda: _earlier(context) or _choose(context, goal, workload, origin)
    )
    resolved = _with(context.resolved, chosen)
    log(*shape_notes(resolved.recipe.student))
    return replace(context, resolved=resolved)


def how_distilled(teacher: Card | None, recipe: DistillRecipe) -> str:
    """Describe how a student is made, for its model card."""
    source = recipe.data.source
    on_text = f" on {short(source)}" if source else ""
    if teacher is None:
        return f"trained without a teacher{on_text}"
    named = f"{short(teacher.id)} ({card_shape(teacher)})"
    if not recipe.train.trains:
        return f"made from {named}{on_text}, without training"
    return f"distilled from {named} with {recipe.method}{on_text}"


def shape_notes(student: StudentSettings) -> list[str]:
    """Return the note on a family, or on the shape that was chosen for a goal."""
    if is_family(student.to):
        return ["the students share one training: its time and tokens are of all together"]
    chosen = student.chosen
    # Another --to may have replaced the shape of the recipe.
    if student.to != [chosen.shape]:
        return []
    compared = [line for line in chosen.measured if "cosine" in line] or chosen.measured
    why = chosen.why or "is fast enough"
    return [
        f"--to {chosen.goal}: {chosen.shape} {why} on {chosen.backend}. Untrained: "
        f"{'; '.join(compared)}"
    ]


def like_first(
    first: Resolved[DistillRecipe], other: Resolved[DistillRecipe]
) -> Resolved[DistillRecipe]:
    """Return a variant's recipe with the shape that was chosen for the first variant."""
    if goal_of(other.recipe.student.to) is None:
        return other
    return _with(other, first.recipe.student.chosen)


def _with(resolved: Resolved[DistillRecipe], chosen: ChosenShape) -> Resolved[DistillRecipe]:
    """Return the recipe with a shape in place of its goal."""
    student = resolved.recipe.student
    changed = student.model_copy(update={"to": [chosen.shape], "chosen": chosen})
    origin = f"fast enough for {chosen.goal}"
    keys = ("student.to", *(f"student.chosen.{key}" for key in ChosenShape.model_fields))
    return Resolved(
        resolved.recipe.model_copy(update={"student": changed}),
        {**resolved.origins, **dict.fromkeys(keys, origin)},
    )


def _earlier(context: RunContext[DistillRecipe]) -> ChosenShape | None:
    """Return the shape of the run that is resumed, if it was chosen for the same goal."""
    file = context.folder / RECIPE_FILE
    if not context.options.resume or not file.is_file():
        return None
    before = resolve(DistillRecipe, recipe=str(file)).recipe.student
    is_same_goal = [before.chosen.goal] == context.recipe.student.to
    is_same = is_same_goal and before.to == [before.chosen.shape]
    return before.chosen if is_same else None


def _choose(
    context: RunContext[DistillRecipe], goal: SpeedGoal, workload: Workload, origin: Model
) -> ChosenShape:
    """Time untrained students, and choose one; see `choose_shape`."""
    recipe = context.recipe
    backend, encoder = recipe.student.backend, replace(origin, model=origin.model.base_model)
    baseline = Subject(TEACHER, location(str(recipe.teacher or origin.source)))
    protocol = Protocol(
        str(context.session.device),
        min(recipe.measure.min_runs, MIN_RUNS),
        min(recipe.measure.min_seconds, MIN_SECONDS),
        CELLS[:1],
        max_measurements=1,
    )
    # Only a goal in milliseconds depends on how fast the teacher is in torch.
    if backend != "torch" or goal.speedup is None:
        _check_slower(goal, baseline, backend, protocol)

    def measure(shapes: Mapping[str, ModelShape]) -> dict[str, UntrainedTimes]:
        return times_of_shapes(
            shapes,
            encoder,
            backend,
            baseline,
            recipe.train.seed,
            lambda subjects: measured_times(subjects, protocol),
        )

    def compare() -> Compare:
        return workload.comparison(origin, SHAPE_ROWS).cosine

    chosen = choose_shape(goal, encoder, measure, compare)
    (text,) = recipe.student.to
    return ChosenShape(
        goal=text, shape=chosen.name, backend=backend, why=chosen.why, measured=chosen.measured
    )


def _check_slower(goal: SpeedGoal, teacher: Subject, backend: str, protocol: Protocol) -> None:
    """Raise a UsageError if the teacher meets the goal as it is."""
    log(f"measuring {teacher.source} on {backend}")
    own = teacher if backend == "torch" else subject_of(backend, teacher.source, backend)
    measured = measured_times(list(dict.fromkeys((teacher, own))), protocol)
    times = measured.get(own.name, UntrainedTimes())
    if times.load(goal) <= 1:
        exported = "" if backend == "torch" else "use the teacher on that backend, or "
        raise UsageError(
            f"{teacher.source} is already fast enough for --to {goal} on {backend}: {times}",
            f"{exported}give a higher speed-up or a lower latency",
        )
