"""`kdcli cotrain`."""

from kdcli.cli.show import Printable
from kdcli.cli.verb import COMPRESS, TRAINING, Given, verb

# A run makes two models, and a repository holds one.
SHARED = tuple(name for name in TRAINING if name != "push_to_hub")


@verb(*SHARED, examples=("kdcli cotrain 4x128 2x64 --data demo --max-steps 100",), panel=COMPRESS)
def cotrain(given: Given) -> Printable | None:
    """Train two models that learn from each other: on unlabelled text, or on a task with --task."""
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.cotrain.settings import CotrainRecipe, CotrainTaskRecipe

    on_task = given["task"] is not None or given.kind_of_recipe == "cotrain-task"
    kind = "cotrain-task" if on_task else "cotrain"
    model: type[CotrainRecipe | CotrainTaskRecipe] = CotrainTaskRecipe if on_task else CotrainRecipe
    options, keys = given.run_options, given.keys(kind)
    resolved = resolve(model, recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.cotrain import run

    return given.show(run.cotrain(resolved, options))
