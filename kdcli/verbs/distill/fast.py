"""Choose the student's shape for a goal: `--to 2x` or `--to 5ms`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from kdcli.deploy.latency import CELLS, Protocol, Subject
from kdcli.deploy.runners import check_backend
from kdcli.deploy.untrained import (
    Compare,
    UntrainedTimes,
    choose_shape,
    is_fast_enough,
    measured_times,
    subject_of,
    times_of_shapes,
)
from kdcli.disk import RECIPE_FILE
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.models.choose import SHAPE_ROWS, check_rows
from kdcli.models.grammar import SpeedGoal, goal_of
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.recipe.resolve import Resolved, resolve
from kdcli.recipe.sections import Section
from kdcli.report.schema import TEACHER
from kdcli.report.text import card_shape, short
from kdcli.run.context import RunContext
from kdcli.types import Card, ModelShape
from kdcli.verbs.distill.settings import DistillRecipe, StudentSettings, TaskDistillRecipe
from kdcli.workloads.settings import ChosenShape, RerankRecipe, RerankStudentSettings
from kdcli.workloads.workload import Workload

MIN_RUNS, MIN_SECONDS = 30, 3.0
"""The most that `measure.min_runs` and `measure.min_seconds` ask for when a shape is chosen.

A few percent decide little, so it needs less precision than a report.
"""
RecipeT = TypeVar("RecipeT", DistillRecipe, TaskDistillRecipe, RerankRecipe)


def with_shape(
    context: RunContext[RecipeT], workload: Workload, origin: Model
) -> RunContext[RecipeT]:
    """Replace a goal in `student.to` by the shape that `choose_shape` chooses for it.

    A run that is resumed keeps its shape, and nothing is timed. A recipe with a shape is returned
    as it is.

    Args:
        context: the run.
        workload: the texts on which students are compared with the model they are made from.
        origin: the model that the student is made from.

    Raises:
        UsageError: the teacher meets the goal as it is, or there are too few texts.
        GateError: no student is fast enough.
    """
    goal = goal_of(_shapes(context.recipe.student))
    if goal is None:
        return context
    assert workload.sample is not None, "a distillation has texts"
    check_rows(len(workload.sample))
    chosen = context.session.on_main(
        lambda: _earlier(context) or _choose(context, goal, workload, origin)
    )
    resolved = _with(context.resolved, chosen)
    Progress.log(*shape_notes(resolved.recipe.student))
    return replace(context, resolved=resolved)


def check_goal(recipe: DistillRecipe | TaskDistillRecipe | RerankRecipe) -> None:
    """Check that no other key contradicts a goal, and that its backend can be used here.

    Raises UsageError: another key contradicts the goal; MachineError: the backend cannot be used
        here.
    """
    goal = goal_of(_shapes(recipe.student))
    if goal is None:
        return
    if isinstance(recipe.student.layers, list):
        raise UsageError(
            f"student.layers names the layers of one shape, and --to {goal} chooses the shape",
            "remove it, set student.layers=measured, or give a shape",
        )
    if isinstance(recipe, TaskDistillRecipe) and recipe.student.source is not None:
        raise UsageError(
            f"--student names the student, so --to {goal} has nothing to choose", "omit one of them"
        )
    backend, _, precision = recipe.student.backend.partition("-")
    check_backend(backend, precision or "fp32")


def how_distilled(teacher: Card | None, recipe: Section, *, trains: bool = True) -> str:
    """Describe how a student is made, for its model card."""
    values = recipe.model_dump()
    method, source = values.get("method"), values["data"]["source"]
    on_text = f" on {short(source)}" if source else ""
    if teacher is None:
        return f"trained without a teacher{on_text}"
    named = f"{short(teacher.id)} ({card_shape(teacher)})"
    if not trains:
        return f"made from {named}{on_text}, without training"
    return f"distilled from {named}" + (f" with {method}" if method else "") + on_text


def shape_notes(student: StudentSettings | RerankStudentSettings) -> list[str]:
    """Return the note on the shape that was chosen for a goal, for the log and the report."""
    chosen = student.chosen
    # Another --to may have replaced the shape of the recipe.
    if _shapes(student) != [chosen.shape]:
        return []
    compared = [line for line in chosen.measured if "cosine" in line] or chosen.measured
    why = chosen.why or "is fast enough"
    return [
        f"--to {chosen.goal}: {chosen.shape} {why} on {chosen.backend}. Untrained: "
        f"{'; '.join(compared)}"
    ]


def like_first(first: Resolved[RecipeT], other: Resolved[RecipeT]) -> Resolved[RecipeT]:
    """Return a variant's recipe with the shape that was chosen for the first variant."""
    if goal_of(_shapes(other.recipe.student)) is None:
        return other
    return _with(other, first.recipe.student.chosen)


def check_goals(variants: Mapping[str, Resolved[TaskDistillRecipe]]) -> None:
    """Check that variants with a goal can take the shape that is chosen for the first variant.

    Raises UsageError: a variant has another goal or another backend.
    """
    first, *_ = (resolved.recipe.student for resolved in variants.values())
    expected = goal_of(first.to), first.backend
    for name, resolved in variants.items():
        student = resolved.recipe.student
        goal = goal_of(student.to)
        if goal is not None and (goal, student.backend) != expected:
            raise UsageError(
                f"variant {name} asks for {goal} on {student.backend}, but one shape is chosen for "
                f"all variants, for {''.join(first.to) or first.source} on {first.backend}",
                "use the same student.to and student.backend, or run the variants one by one",
            )


def check_untrained(recipe: DistillRecipe | TaskDistillRecipe | RerankRecipe) -> None:
    """Check that a student that is not trained is made from its teacher.

    Raises UsageError: another model is the student.
    """
    if recipe.train.trains:
        return
    made_elsewhere = {
        "--student": recipe.student.source is not None,
        "the stage on text (--corpus, --general)": isinstance(recipe, TaskDistillRecipe)
        and recipe.general.use,
    }
    for name, is_given in made_elsewhere.items():
        if is_given:
            raise UsageError(
                "--max-steps 0 saves a student made from its teacher without training, so it "
                f"cannot be combined with {name}",
                "omit one of them",
            )


def _shapes(student: StudentSettings | RerankStudentSettings) -> list[str]:
    if isinstance(student, StudentSettings):
        return student.to
    return [] if student.to is None else [student.to]


def _with(resolved: Resolved[RecipeT], chosen: ChosenShape) -> Resolved[RecipeT]:
    """Return the recipe with a shape in place of its goal."""
    student = resolved.recipe.student
    to = [chosen.shape] if isinstance(student, StudentSettings) else chosen.shape
    changed = student.model_copy(update={"to": to, "chosen": chosen})
    origin = f"fast enough for {chosen.goal}"
    keys = ("student.to", *(f"student.chosen.{key}" for key in ChosenShape.model_fields))
    return Resolved(
        resolved.recipe.model_copy(update={"student": changed}),
        {**resolved.origins, **dict.fromkeys(keys, origin)},
    )


def _earlier(context: RunContext[RecipeT]) -> ChosenShape | None:
    """Return the shape of the run that is resumed, if it was chosen for the same goal."""
    file = context.folder / RECIPE_FILE
    if not context.options.resume or not file.is_file():
        return None
    before = resolve(type(context.recipe), recipe=str(file)).recipe.student
    is_same_goal = [before.chosen.goal] == _shapes(context.recipe.student)
    is_same = is_same_goal and _shapes(before) == [before.chosen.shape]
    return before.chosen if is_same else None


def _choose(
    context: RunContext[RecipeT], goal: SpeedGoal, workload: Workload, origin: Model
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
        Progress.log(f"measuring {', '.join(shapes)} untrained on {backend}")
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
    (text,) = _shapes(recipe.student)
    return ChosenShape(
        goal=text, shape=chosen.name, backend=backend, why=chosen.why, measured=chosen.measured
    )


def _check_slower(goal: SpeedGoal, teacher: Subject, backend: str, protocol: Protocol) -> None:
    """Raise a UsageError if the teacher meets the goal as it is."""
    Progress.log(f"measuring {teacher.source} on {backend}")
    own = teacher if backend == "torch" else subject_of(backend, teacher.source, backend)
    measured = measured_times(list(dict.fromkeys((teacher, own))), protocol)
    times = measured.get(own.name, UntrainedTimes())
    if is_fast_enough(goal, times):
        exported = "" if backend == "torch" else "use the teacher on that backend, or "
        raise UsageError(
            f"{teacher.source} is already fast enough for --to {goal} on {backend}: {times}",
            f"{exported}give a higher speed-up or a lower latency",
        )
