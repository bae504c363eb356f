"""`kdcli cotrain`."""

from kdcli.cli.verb import COMPRESS, TRAINING, Given, Printable, verb

# A run makes two models, and a repository holds one.
SHARED = tuple(name for name in TRAINING if name != "push_to_hub")


@verb(*SHARED, examples=("kdcli cotrain 4x128 2x64 --data demo --max-steps 100",), panel=COMPRESS)
def cotrain(given: Given) -> Printable | None:
    """Train two models that learn from each other: on unlabelled text, or on a task with --task."""
    from kdcli.recipe.resolve import ablations, variant_origin
    from kdcli.verbs.cotrain.settings import CotrainRecipe

    options = given.run_options
    resolved = given.resolve(CotrainRecipe)
    variants = {"": resolved}
    if (listed := resolved.recipe.ablate) is not None:
        variants = {
            name: given.resolve(CotrainRecipe, above={variant_origin(listed, name): changes})
            for name, changes in ablations(listed).items()
        }
    from kdcli.verbs.cotrain import run

    return given.show(run.cotrain(resolved, options, variants))
