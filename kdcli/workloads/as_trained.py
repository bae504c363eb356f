"""Default data settings from the run that trained a model."""

from pathlib import Path

from kdcli.disk import RECIPE_FILE, holds_run
from kdcli.engine.progress import Progress
from kdcli.models.load import location
from kdcli.recipe.resolve import RecipeT, Resolved, defaulted, flatten, read_recipe
from kdcli.recipe.sections import RecipeValues
from kdcli.workloads.settings import LabelledSettings


def as_trained(
    resolved: Resolved[RecipeT], model: str | None, *, task: bool = True, trains: bool = True
) -> Resolved[RecipeT]:
    """Fill unset data settings of a recipe from the run that trained a model, and log them.

    These are the columns, the split seed, the overlap of windows and the maximum length. Nothing
    changes if the recipe has a different task.

    Args:
        resolved: The recipe.
        model: The model; None leaves the recipe unchanged.
        task: Also fill the task if it is unset.
        trains: Also fill the maximum length. If False, every evaluated model uses its own.

    Raises:
        UsageError: The `recipe.yaml` of the run cannot be read.
    """
    training = _recipe_of(Path(location(model))) if model is not None else {}
    data, task_name = training.get("data"), getattr(resolved.recipe, "task", None)
    if task_name is None and task:
        task_name = training.get("task")
    if not isinstance(data, dict) or task_name is None or task_name != training.get("task"):
        return resolved
    has_own_stride = data.get("stride") != LabelledSettings.model_fields["stride"].default
    keys = ("columns", "split_seed", *["stride"] * has_own_stride, *["max_length"] * trains)
    settings = {"task": task_name} | {f"data.{key}": data[key] for key in keys if data.get(key)}
    # If the user sets one column, the other columns of the run do not apply either.
    settings = {
        key: value
        for key, value in settings.items()
        if not any(name.startswith(key) for name in resolved.origins)
    }
    if settings:
        values = ", ".join(f"{key}={value}" for key, value in flatten(settings))
        Progress.log(f"settings from the training run of {model}: {values}")
    return defaulted(resolved, settings, f"the training run of {model}")


def _recipe_of(folder: Path) -> RecipeValues:
    """Read the recipe of the run that wrote a model, or return an empty one.

    The run directory is the model's folder. For one model of a pair, or another form of a model, it
    is the parent.
    """
    for run in (folder, folder.resolve().parent) if folder.is_dir() else ():
        if holds_run(run):
            return read_recipe(str(run / RECIPE_FILE), None)
    return {}


def trained_task(model: str | None) -> str | None:
    """Return the task on which a run trained a model, if any.

    Raises:
        UsageError: The `recipe.yaml` of the run cannot be read.
    """
    return _recipe_of(Path(location(model))).get("task") if model is not None else None
