"""What the recipe of a model's own run says about its data, for the recipes of other verbs."""

from pathlib import Path
from typing import Any

from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import LOG, RECIPE
from kdcli.models.load import location
from kdcli.recipe.resolve import RecipeT, Resolved, defaulted, flatten, read_recipe


def as_trained(
    resolved: Resolved[RecipeT], model: str | None, *, task: bool = True, trains: bool = True
) -> Resolved[RecipeT]:
    """The recipe with the columns, length and split of the run that made a model, where nobody set
    them, and says so; of another task nothing is taken. `task`: take the task too if there is none.
    `trains`: False leaves the length to each judged model. Raises UsageError: its recipe.yaml
    cannot be read."""
    made = _recipe_of(Path(location(model))) if model is not None else {}
    known, wanted = made.get("data"), getattr(resolved.recipe, "task", None)
    if wanted is None and task:
        wanted = made.get("task")
    if not isinstance(known, dict) or wanted is None or wanted != made.get("task"):
        return resolved
    found = {"task": wanted}
    keys = ("columns", "split_seed", *["max_length"] * trains)
    found |= {f"data.{key}": known[key] for key in keys if known.get(key)}
    # One column that the user gives replaces all.
    found = {
        key: value
        for key, value in found.items()
        if not any(o.startswith(key) for o in resolved.origins)
    }
    if found:
        said = ", ".join(f"{key}={value}" for key, value in flatten(found))
        Progress.log(f"as {model} was trained: {said}")
    return defaulted(resolved, found, f"as {model} was trained")


def _recipe_of(folder: Path) -> dict[str, Any]:
    """The recipe of the run that wrote a model there or, of a pair or of another form of one model,
    above."""
    for run in (folder, folder.resolve().parent) if folder.is_dir() else ():
        if (run / RECIPE).is_file() and (run / LOG).is_file():
            return read_recipe(str(run / RECIPE), None)
    return {}


def trained_task(model: str | None) -> str | None:
    """The task of the run that made a model, if any. Raises UsageError: its recipe.yaml cannot be
    read."""
    return _recipe_of(Path(location(model))).get("task") if model is not None else None
