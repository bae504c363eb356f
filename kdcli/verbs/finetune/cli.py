"""`kdcli finetune`."""

from kdcli.cli.verb import TRAIN, TRAINING, Given, Printable, verb


@verb(
    *TRAINING,
    examples=(
        "kdcli finetune demo --task demo-topic --lr 1e-3",
        "kdcli finetune runs/student --task own --data ./my-data",
    ),
    panel=TRAIN,
)
def finetune(given: Given) -> Printable | None:
    """Fine-tune an encoder on a labelled task, and evaluate it."""
    if given["task"] is None and given.recipe is None and given["data"] is not None:
        from kdcli.workloads.detect import known_task

        given.values["task"] = known_task(given["model"], given["data"])
    from kdcli.recipe.resolve import grid_options
    from kdcli.workloads.finetune_recipes import finetune_recipe
    from kdcli.workloads.settings import FinetuneRecipe

    options, keys = given.run_options, given.keys()
    keys.pop("grid", None)
    keys |= grid_options(FinetuneRecipe, given["grid"] or [])
    resolved = finetune_recipe(recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.finetune import run

    return given.show(run.finetune(resolved, options))
