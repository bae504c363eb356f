"""The recipes of several pruning methods on the same examples and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdcli.commands.prune.settings import PruneRecipe
from kdcli.recipe.resolve import Resolved, flatten, read_recipe, resolve, shipped


def prune_recipes(
    methods: Sequence[str], *, recipe: str | None, sets: Sequence[str], options: Mapping[str, Any]
) -> list[Resolved[PruneRecipe]]:
    """A recipe for each method of pruning, alike but for what belongs to the method.

    Unless a recipe is named, the shipped one of a method and the task is that method's; what it says of data and budget
    holds for the others too, so that all train on the same examples for as long.

    Args:
        methods: none asks for that of the recipe.
        recipe, sets, options: as in `resolve`.

    Raises:
        UsageError: see `resolve`.
    """
    first = resolve(PruneRecipe, recipe=recipe, sets=sets, options=options).recipe
    asked = list(methods) or [first.method]
    of_task = {method: f"{method}-{first.task}" for method in asked} if recipe is None else {}
    there = {m: dict(flatten(read_recipe(name, "prune"))) for m, name in of_task.items() if name in shipped("prune")}
    found = []
    for method in asked:
        beneath = {
            f"recipe {of_task[other]}": values if other == method else _budget(values)
            for other, values in there.items()
        }
        own = {**options, "method": method if methods else None}
        found.append(resolve(PruneRecipe, recipe=recipe, beneath=beneath, sets=sets, options=own))
    return found


def _budget(values: Mapping[str, Any]) -> dict[str, Any]:
    """What methods share of a recipe: the examples and the steps, not the learning rate."""
    return {k: v for k, v in values.items() if k.startswith(("data.", "train.")) and k != "train.lr"}
