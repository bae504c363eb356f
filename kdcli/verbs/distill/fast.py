"""Choose the student's shape for a goal: `--to 2x` or `--to 5ms`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kdcli.deploy.latency import CELLS, Protocol, Subject
from kdcli.deploy.runners import check_backend
from kdcli.deploy.untrained import (
    QUARTILE,
    UntrainedTimes,
    choose_shape,
    is_fast_enough,
    measured_times,
    subject_of,
    times_of_shapes,
)
from kdcli.disk import RECIPE_FILE
from kdcli.engine.launch import Session, choose_output_dir, launch, output_dir
from kdcli.engine.progress import Progress
from kdcli.errors import UsageError
from kdcli.models.grammar import SpeedGoal, goal_of
from kdcli.models.load import load_encoder, location
from kdcli.recipe.resolve import Resolved, resolve
from kdcli.recipe.sections import RunOptions
from kdcli.report.schema import TEACHER
from kdcli.types import ModelShape
from kdcli.verbs.distill.settings import DistillRecipe, StudentSettings, TaskDistillRecipe
from kdcli.workloads.settings import ChosenShape, RerankRecipe, RerankStudentSettings

MIN_RUNS, MIN_SECONDS = 30, 3.0
"""The most that `measure.min_runs` and `measure.min_seconds` ask for when a shape is chosen.

The shapes differ by whole layers, so that their order needs less precision than a report.
"""
RecipeT = TypeVar("RecipeT", DistillRecipe, TaskDistillRecipe, RerankRecipe)
CHOSEN = ("student.to", "student.chosen.")
"""Beginnings of the keys in which a run's recipe has a shape instead of a goal."""


def with_shape(
    resolved: Resolved[RecipeT], options: RunOptions, name: str
) -> Resolved[RecipeT] | None:
    """Replace a goal in `student.to` by the shape that `choose_shape` chooses for it.

    A run that is resumed keeps its shape, and nothing is timed. A recipe with a shape is returned
    as it is.

    Args:
        resolved: The recipe.
        options: The options of the run.
        name: The name of the run directory, unless the options give a directory.

    Returns None in a process that only started the other processes.

    Raises UsageError: the goal contradicts other keys, or the teacher meets it as it is; GateError:
        no student is fast enough; MachineError: the backend cannot be used here.
    """
    recipe = resolved.recipe
    goal = goal_of(_shapes(recipe.student))
    if goal is None:
        return resolved
    _check_keys(recipe, goal)
    backend, _, precision = recipe.student.backend.partition("-")
    check_backend(backend, precision or "fp32")
    session = launch(recipe.train.dtype, options)
    if session is None:
        return None

    def find_earlier() -> ChosenShape | None:
        folder = output_dir(name, options, resolved.to_yaml(), CHOSEN)
        return _earlier(resolved, folder, options)

    earlier = session.on_main(find_earlier)
    if earlier is not None:
        return _with(resolved, earlier)
    # A directory that cannot be used is refused before anything is timed.
    choose_output_dir(name, resolved, options, session)
    changed = _with(resolved, session.on_main(lambda: _choose(recipe, goal, session)))
    Progress.log(*shape_notes(changed.recipe.student))
    return changed


def shape_notes(student: StudentSettings | RerankStudentSettings) -> list[str]:
    """Return the note on the shape that was chosen for a goal, for the log and the report."""
    chosen = student.chosen
    # Another --to may have replaced the shape of the recipe.
    if _shapes(student) != [chosen.shape]:
        return []
    return [
        f"--to {chosen.goal}: {chosen.shape} has the most layers of all students that are fast "
        f"enough on {chosen.backend}; untrained: {'; '.join(chosen.measured)}"
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


def _check_keys(recipe: RecipeT, goal: SpeedGoal) -> None:
    """Check that no other key contradicts a goal."""
    if isinstance(recipe.student.layers, list):
        raise UsageError(
            f"student.layers names the layers of one shape, and --to {goal} chooses the shape",
            "remove it, set student.layers=measured, or give a shape",
        )
    if isinstance(recipe, TaskDistillRecipe) and recipe.student.source is not None:
        raise UsageError(
            f"--student names the student, so --to {goal} has nothing to choose", "omit one of them"
        )


def _earlier(resolved: Resolved[RecipeT], folder: Path, options: RunOptions) -> ChosenShape | None:
    """Return the shape of the run that is resumed, if it was chosen for the same goal."""
    file = folder / RECIPE_FILE
    if not options.resume or not file.is_file():
        return None
    before = resolve(type(resolved.recipe), recipe=str(file)).recipe.student
    goal, shapes = goal_of(_shapes(resolved.recipe.student)), _shapes(before)
    is_same = before.chosen.goal == str(goal) and shapes == [before.chosen.shape]
    return before.chosen if is_same else None


def _choose(recipe: RecipeT, goal: SpeedGoal, session: Session) -> ChosenShape:
    """Time untrained students, and choose one; see `choose_shape`."""
    trusted, backend = session.trust_remote_code, recipe.student.backend
    source = str(recipe.student.source or recipe.teacher)
    origin = load_encoder(source, trust_remote_code=trusted)
    baseline = Subject(TEACHER, location(str(recipe.teacher or source)))
    protocol = Protocol(
        str(session.device),
        min(recipe.measure.min_runs, MIN_RUNS),
        min(recipe.measure.min_seconds, MIN_SECONDS),
        CELLS[:1],
        trust_remote_code=trusted,
    )
    # Only a goal in milliseconds depends on how fast the teacher is in torch.
    if backend != "torch" or goal.speedup is None:
        _check_slower(goal, baseline, backend, protocol)

    def measure(shapes: Mapping[str, ModelShape]) -> dict[str, UntrainedTimes]:
        Progress.log(f"measuring {', '.join(shapes)} untrained on {backend}")
        return times_of_shapes(
            shapes,
            origin,
            backend,
            baseline,
            recipe.train.seed,
            lambda subjects: measured_times(subjects, protocol),
        )

    fast = choose_shape(goal, replace(origin, source=source), measure)
    measured = [f"{name}: {times}" for name, times in fast.times.items()]
    if fast.by_quartile:
        measured.append(QUARTILE)
    return ChosenShape(goal=str(goal), shape=fast.name, backend=backend, measured=measured)


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
