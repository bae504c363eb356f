"""`kdcli distill`."""

from typing import Any

from kdcli.cli.verb import TRAINING, Given, verb


@verb(*TRAINING, example="kdcli distill demo --to 2x64 --max-steps 100")
def distill(given: Given) -> Any:
    """Train a smaller student of an encoder: on unlabelled text, or on a task with --task."""
    if "rerank" in (given["task"], given.kind_of_recipe):
        return given.show(_reranker(given))
    if given["task"] is not None or given.kind_of_recipe == "distill-task":
        return given.show(_on_task(given))
    if given["method"] is None and given.recipe is None and given["teacher"] is not None:
        from kdcli.engine.progress import Progress
        from kdcli.workloads.detect import task_to_distill

        teacher = given["teacher"]
        task = task_to_distill(teacher, given["data"])
        if task is not None and given.fits("rerank" if task == "rerank" else "distill-task"):
            given.values["task"] = task
            Progress.log(f"{teacher} is distilled on task {task}; --method distils its encoder")
            return given.show(_reranker(given) if task == "rerank" else _on_task(given))
    return given.show(_on_text(given))


def _on_text(given: Given) -> Any:
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.distill.recipes import ablations, demo_recipe
    from kdcli.verbs.distill.settings import DistillOptions, DistillRecipe

    options, keys = given.run_options, given.keys("distill")
    if (name := given.of(DistillOptions).ablate) is not None:
        keys["variants"] = ablations(name)
    is_demo = given["teacher"] == "demo" and given.recipe is None
    beneath = demo_recipe(given["method"], given.sets) if is_demo else None
    resolved = resolve(
        DistillRecipe, recipe=given.recipe, beneath=beneath, sets=given.sets, options=keys
    )
    from kdcli.verbs.distill import run

    return run.distill(resolved, options)


def _on_task(given: Given) -> Any:
    from kdcli.verbs.distill.recipes import ablations, task_recipe
    from kdcli.verbs.distill.settings import DistillOptions

    options, keys = given.run_options, given.keys("distill-task")
    own = given.of(DistillOptions)
    resolved = task_recipe(recipe=given.recipe, sets=given.sets, options=keys)
    changes = ablations(own.ablate) if own.ablate is not None else {}
    variants = {
        name: task_recipe(recipe=given.recipe, sets=given.sets, options=keys, overrides=overrides)
        for name, overrides in changes.items()
    }
    from kdcli.verbs.distill import labelled, run

    if own.augment_only is not None:
        return labelled.write_copies(resolved, options, own.augment_only)
    if variants:
        return run.distill_variants(variants, options)
    return run.distill_on_task(resolved, options)


def _reranker(given: Given) -> Any:
    from kdcli.recipe.resolve import resolve
    from kdcli.workloads.settings import RerankRecipe

    options, keys = given.run_options, given.keys("rerank")
    resolved = resolve(RerankRecipe, recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.distill.outputs import distill_reranker

    return distill_reranker(resolved, options)
