"""`kdcli cotrain`."""

from kdcli.cli.verb import COMPRESS, TRAINING, Given, Printable, verb

# A run makes two models, and a repository holds one.
SHARED = tuple(name for name in TRAINING if name != "push_to_hub")


@verb(*SHARED, examples=("kdcli cotrain 4x128 2x64 --data demo --max-steps 100",), panel=COMPRESS)
def cotrain(given: Given) -> Printable | None:
    """Train two models that learn from each other: on unlabelled text, or on a task with --task."""
    from kdcli.recipe.resolve import ablations, resolve
    from kdcli.verbs.cotrain.settings import CotrainRecipe

    options = given.run_options
    resolved = resolve(CotrainRecipe, recipe=given.recipe, sets=given.sets, options=given.keys())
    variants = {"": resolved}
    if (listed := resolved.recipe.ablate) is not None:
        keys = given.keys()
        variants = {
            name: resolve(
                CotrainRecipe, recipe=given.recipe, sets=given.sets, options={**keys, **changes}
            )
            for name, changes in ablations(listed).items()
        }
    from kdcli.verbs.cotrain import run

    return given.show(run.cotrain(resolved, options, variants))
