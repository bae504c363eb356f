"""`kdcli finetune`."""

from typing import Any

from kdcli.cli.verb import TRAINING, Given, verb


@verb(*TRAINING, example="kdcli finetune demo --task demo-topic --lr 1e-3")
def finetune(given: Given) -> Any:
    """Fine-tune an encoder on a labelled task, and evaluate it."""
    from kdcli.recipe.resolve import grid_options, resolve
    from kdcli.workloads.recipes import finetune_recipe
    from kdcli.workloads.settings import FinetuneRecipe, RerankRecipe

    if given["task"] is None and given.recipe is None and given["data"] is not None:
        from kdcli.workloads.detect import known_task

        given.values["task"] = known_task(given["model"], given["data"])
    kind = "rerank" if "rerank" in (given["task"], given.kind_of_recipe) else "finetune"
    options, keys = given.run_options, given.keys(kind)
    if kind == "rerank":
        ranking = resolve(RerankRecipe, recipe=given.recipe, sets=given.sets, options=keys)
        from kdcli.verbs.finetune.run import finetune_reranker

        return given.show(finetune_reranker(ranking, options))
    keys |= grid_options(FinetuneRecipe, keys.pop("grid", []))
    resolved = finetune_recipe(recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.finetune import run

    return given.show(run.finetune(resolved, options))
