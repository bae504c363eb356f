"""`kdcli prune`."""

from kdcli.cli.show import Printable
from kdcli.cli.verb import COMPRESS, TRAINING, Given, verb


@verb(
    *TRAINING,
    examples=("kdcli prune demo --task demo-topic --method smp --sparsity 0.9",),
    panel=COMPRESS,
)
def prune(given: Given) -> Printable | None:
    """Remove weights of an encoder while it learns a task (SMP and its baselines)."""
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.prune.settings import PruneRecipe

    options, keys = given.run_options, given.keys()
    keys.pop("method", None)
    # The imports below take seconds, so the recipe is checked first.
    resolve(PruneRecipe, recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.prune import run
    from kdcli.verbs.prune.method_recipes import prune_recipes

    recipes = prune_recipes(
        given["method"] or [], recipe=given.recipe, sets=given.sets, options=keys
    )
    return given.show(run.prune(recipes, options))
