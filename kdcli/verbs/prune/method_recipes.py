"""Resolve one recipe for each pruning method.

The methods share the examples and the budget, and have their own settings.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from kdcli.pruners import defaults
from kdcli.recipe.resolve import (
    Resolved,
    defaulted,
    recipe_keys,
    resolve,
    shipped,
)
from kdcli.types import OWN
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.detect import with_task

OF_A_METHOD = ("method", "train.lr", "train.warmup_fraction", "pruner.", "kd.", "head.")
"""The keys of a recipe with a method that other methods do not share."""


def prune_recipes(
    methods: Sequence[str],
    *,
    recipe: str | None,
    sets: Sequence[str],
    options: Mapping[str, object],
    above: Mapping[str, Mapping[str, object]] | None = None,
    compared: Sequence[str] = (),
) -> list[Resolved[PruneRecipe]]:
    """Resolve a recipe for each method.

    Unless `recipe` names a task itself, each method also takes values from the shipped recipe of
    its name and the task. The other methods share the data and the budget of that recipe. Without a
    task, the model and the data decide it; see `known_task`.

    Args:
        methods: The methods; empty for the recipe's own method.
        compared: The methods of other runs that these are compared with.
        recipe: The name or the path of a recipe.
        sets: Assignments of keys, such as `train.lr=0.01`.
        options: Recipe keys and their values.
        above: Values that override the options, by origin.

    Raises:
        UsageError: The recipe or a key is unknown, or a value is wrong.
    """
    read = partial(resolve, PruneRecipe, sets=sets, above=above)
    resolved_once = read(recipe=recipe, options=options)
    if "model" in resolved_once.origins:
        given = resolved_once.recipe
        pooling = given.workload.get("pooling")
        found = with_task(resolved_once, given.model, given.data.source, pooling)
        if "task" in found.origins:
            options = {**options, "task": found.recipe.task}
            resolved_once = found
    first = resolved_once.recipe
    chosen = list(methods) or [first.method]
    own_keys = recipe_keys(recipe, "prune") if recipe is not None else {}
    # A recipe that names a task replaces the shipped ones.
    every = [] if "task" in own_keys else [*compared, *chosen]
    names = {method: f"{method}-{first.task}" for method in every}
    layers = {
        f"recipe {name}": {**recipe_keys(name, "prune"), "method": method}
        for method, name in names.items()
        if name in shipped("prune")
    }
    if recipe is not None:
        layers[f"recipe {recipe}"] = own_keys
    resolved = []
    for method in chosen:
        beneath = {origin: _read_by(method, keys) for origin, keys in layers.items()}
        own = {**options, "method": method if methods else None}
        resolved.append(read(recipe=None, beneath=beneath, options=own))
    return resolved


def _read_by(method: str, keys: Mapping[str, object]) -> Mapping[str, object]:
    """Return the keys of a recipe that a method reads.

    Methods share the examples and the steps, but not the learning rate.
    """
    if keys.get("method", method) == method:
        return keys
    return {key: value for key, value in keys.items() if not key.startswith(OF_A_METHOD)}


def with_defaults(resolved: Resolved[PruneRecipe]) -> Resolved[PruneRecipe]:
    """Set the values of the method's authors for keys that the user did not set.

    Raises:
        UsageError: There is no such method.
    """
    method = resolved.recipe.method
    own = defaults(method)
    # The user's own classes have no label words unless the recipe names some.
    has_words = resolved.recipe.task != OWN or resolved.recipe.head.words is not None
    keys = {
        "train.lr": own.lr,
        "train.warmup_fraction": own.warmup,
        "kd.weight": own.teacher,
        "head.kind": own.head if has_words else "scratch",
    }
    return defaulted(resolved, keys, f"method {method}")
