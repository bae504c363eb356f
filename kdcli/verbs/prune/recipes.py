"""One recipe for each method: the same examples and budget, the method's own settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from kdcli.pruners import defaults
from kdcli.recipe.resolve import Resolved, defaulted, flatten, read_recipe, resolve, shipped
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.as_trained import trained_task


def prune_recipes(
    methods: Sequence[str], *, recipe: str | None, sets: Sequence[str], options: Mapping[str, Any]
) -> list[Resolved[PruneRecipe]]:
    """Resolve a recipe for each method, or for the recipe's own if none is given; see `resolve`.
    Unless `recipe` names a task itself, a method takes the shipped recipe of its name and the task,
    beneath `recipe`. The data and budget of that recipe hold for the other methods too. A model
    that kdcli trained on a task is pruned on it if none is given."""
    given = resolve(PruneRecipe, recipe=recipe, sets=sets, options=options)
    if "task" not in given.origins and (task := trained_task(given.recipe.model)) is not None:
        options = {**options, "task": task}
        given = resolve(PruneRecipe, recipe=recipe, sets=sets, options=options)
    first = given.recipe
    chosen = list(methods) or [first.method]
    whole = recipe is not None and "task" in read_recipe(recipe, "prune")
    names = {} if whole else {method: f"{method}-{first.task}" for method in chosen}
    available = {
        m: dict(flatten(read_recipe(name, "prune")))
        for m, name in names.items()
        if name in shipped("prune")
    }
    resolved = []
    for method in chosen:
        beneath = {}
        for other, values in available.items():
            # Methods share examples and steps, not the learning rate.
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
    """The recipe with what its method's authors ran it with, for keys that nobody set. Raises
    UsageError: no such method."""
    method = resolved.recipe.method
    own = defaults(method)
    keys = {
        "train.lr": own.lr,
        "train.warmup_fraction": own.warmup,
        "kd.weight": own.teacher,
        "head.kind": own.head,
    }
    return defaulted(resolved, keys, f"method {method}")
