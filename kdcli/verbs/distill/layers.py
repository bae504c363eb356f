"""How a student starts, and the choice of layers for `student.layers: measured`."""

from __future__ import annotations

import json
from dataclasses import replace

from kdcli.disk import RECIPE_FILE
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import flatten_recipe
from kdcli.errors import UsageError
from kdcli.models.choose import ROWS, measured_layers
from kdcli.models.model import Model
from kdcli.recipe.resolve import Resolved
from kdcli.run.context import RunContext
from kdcli.types import Start
from kdcli.verbs.distill.settings import DistillRecipe, StudentSettings
from kdcli.workloads.workload import Workload


def start_of(student: StudentSettings, seed: int) -> Start:
    """Return how the student of a recipe starts, once its layers are chosen."""
    return Start(student.init, student.copied, student.dropout, seed)


def with_measured_layers(
    context: RunContext[DistillRecipe], workload: Workload, teacher: Model, depths: set[int]
) -> RunContext[DistillRecipe]:
    """Return the context of a run whose recipe lists the layers instead of `measured`.

    A resumed run has the layers of its own recipe. A dry run takes evenly spaced layers, because
    they cost as much.

    Args:
        context: The run.
        workload: The texts on which choices are tried.
        teacher: The model whose layers are copied.
        depths: The numbers of layers of the students.

    Raises UsageError: the students have different depths.
    """
    if context.recipe.student.layers != "measured":
        return context
    if len(depths) > 1:
        raise UsageError(
            "student.layers=measured chooses layers for one depth, but the students have "
            f"{', '.join(map(str, sorted(depths)))} layers",
            "run the command once for each depth",
        )
    layers = None
    if not context.dry_run:
        (depth,) = depths
        layers = context.session.on_main(
            lambda: (
                _stored(context)
                or measured_layers(workload.comparison(teacher, ROWS), depth, Progress.log)
            )
        )
    student = context.recipe.student.model_copy(update={"layers": layers})
    recipe = context.recipe.model_copy(update={"student": student})
    origins = {**context.resolved.origins, "student.layers": "measured"}
    return replace(context, resolved=Resolved(recipe, origins))


def _stored(context: RunContext[DistillRecipe]) -> list[int] | None:
    """Return the layers in the recipe of the run that is resumed; None if it has none."""
    file = context.folder / RECIPE_FILE
    if not (context.options.resume and file.is_file()):
        return None
    layers = json.loads(flatten_recipe(file.read_text("utf-8"))["student.layers"])
    return layers if isinstance(layers, list) else None
