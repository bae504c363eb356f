"""`kdcli prune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdcli.cli.verb import COMPRESS, TRAINING, Given, Printable, verb
from kdcli.errors import UsageError

if TYPE_CHECKING:
    from kdcli.recipe.resolve import Resolved


@verb(
    *TRAINING,
    examples=("kdcli prune demo --task demo-topic --method smp --sparsity 0.9",),
    panel=COMPRESS,
)
def prune(given: Given) -> Printable | None:
    """Remove weights of an encoder while it learns a task."""
    from kdcli.recipe.resolve import ablations, resolve, variant_origin
    from kdcli.verbs.prune.settings import PruneRecipe

    options, keys = given.run_options, given.keys()
    keys.pop("method", None)
    # The imports below take seconds, so the recipe is checked first.
    resolve(PruneRecipe, recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.prune import run
    from kdcli.verbs.prune.method_recipes import prune_recipes

    def recipes(
        changes: Mapping[str, Any], origin: str = "", compared: Sequence[str] = ()
    ) -> list[Resolved[PruneRecipe]]:
        methods = [changes["method"]] if "method" in changes else given["method"] or []
        return prune_recipes(
            methods,
            recipe=given.recipe,
            sets=given.sets,
            options=keys,
            above={origin: changes},
            compared=compared,
        )

    whole = recipes({})
    listed = whole[0].recipe.ablate
    if listed is not None and len(whole) > 1:
        raise UsageError(
            f"--ablate {listed} takes one method, got {', '.join(given['method'])}",
            "give one --method; the list of variants may name others",
        )
    changes = {} if listed is None else ablations(listed)
    compared = [each.recipe.method for each in whole]
    compared += [str(own["method"]) for own in changes.values() if "method" in own]
    variants = {
        name: recipes(own, variant_origin(str(listed), name), compared)
        for name, own in changes.items()
    }
    return given.show(run.prune(whole, options, variants))
