"""Resolve one recipe for each pruning method.

The methods share the examples and the budget, and have their own settings.
"""

from collections.abc import Mapping, Sequence

from kdcli.pruners import defaults
from kdcli.recipe.resolve import (
    Resolved,
    defaulted,
    read_recipe,
    recipe_keys,
    resolve,
    shipped,
)
from kdcli.types import OWN
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.detect import with_task


def prune_recipes(
    methods: Sequence[str],
    *,
    recipe: str | None,
    sets: Sequence[str],
    options: Mapping[str, object],
) -> list[Resolved[PruneRecipe]]:
    """Resolve a recipe for each method.

    Unless `recipe` names a task itself, each method also takes values from the shipped recipe of
    its name and the task. The other methods share the data and the budget of that recipe. Without a
    task, the model and the data decide it; see `known_task`.

    Args:
        methods: The methods; empty for the recipe's own method.
        recipe: The name or the path of a recipe.
        sets: Assignments of keys, such as `train.lr=0.01`.
        options: Recipe keys and their values.

    Raises:
        UsageError: The recipe or a key is unknown, or a value is wrong.
    """
    resolved_once = resolve(PruneRecipe, recipe=recipe, sets=sets, options=options)
    if "model" in resolved_once.origins:
        given = resolved_once.recipe
        pooling = given.workload.get("pooling")
        found = with_task(resolved_once, given.model, given.data.source, pooling)
        if "task" in found.origins:
            options = {**options, "task": found.recipe.task}
            resolved_once = found
    first = resolved_once.recipe
    chosen = list(methods) or [first.method]
    whole = recipe is not None and "task" in read_recipe(recipe, "prune")
    names = {} if whole else {method: f"{method}-{first.task}" for method in chosen}
    available = {
        m: recipe_keys(name, "prune") for m, name in names.items() if name in shipped("prune")
    }
    resolved = []
    for method in chosen:
        beneath = {}
        for other, values in available.items():
            # Methods share the examples and the steps, but not the learning rate.
            shared = [k for k in values if k.startswith(("data.", "train.")) and k != "train.lr"]
            beneath[f"recipe {names[other]}"] = (
                values if other == method else {k: values[k] for k in shared}
            )
        own = {**options, "method": method if methods else None}
        resolved.append(
            resolve(PruneRecipe, recipe=recipe, beneath=beneath, sets=sets, options=own)
        )
    return resolved


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
