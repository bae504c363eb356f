"""`kdcli distill`."""

from kdcli.cli.show import Printable
from kdcli.cli.verb import COMPRESS, TRAINING, Given, verb
from kdcli.errors import UsageError

EMBEDDING = "embedding"
"""The task and the method of embedding models, which are distilled on text."""
RETRIEVAL = "retrieval"
"""The task that scores embedding models on searches."""


@verb(
    *TRAINING,
    examples=(
        "kdcli distill demo --to 2x64 --max-steps 100",
        "kdcli distill runs/teacher --task mrpc --to 3x384",
    ),
    panel=COMPRESS,
)
def distill(given: Given) -> Printable | None:
    """Train a smaller student of an encoder: on unlabelled text, or on a task with --task."""
    _check_shapes(given)
    if given["task"] == RETRIEVAL:
        raise UsageError(
            f"task {RETRIEVAL} scores embedding models, and trains none",
            f"distil with --data TEXT instead of --task, and score with --eval-task {RETRIEVAL} "
            "--set eval.source=DIR",
        )
    if given.recipe is None:
        _choose_embedding(given)
    named = (given["task"], given["method"], given.recipe)
    if given["teacher"] is not None and named == (None, None, None):
        _check_sets(given)
        _detect_task(given)
    run = {"distill": _on_text, "distill-task": _on_task, "rerank": _reranker}
    return given.show(run[_kind(given, given["task"])](given))


def _choose_embedding(given: Given) -> None:
    """Choose method `embedding` for the task of this name, and for an encoder with a pooling."""
    if given["task"] == EMBEDDING:
        if given["method"] not in (None, EMBEDDING):
            raise UsageError(
                f"--task {EMBEDDING} is distilled with --method {EMBEDDING}, not {given['method']}",
                "remove --task or --method",
            )
        given.values["task"] = None
    elif given["pooling"] is None or given["task"] is not None:
        return
    if given["method"] is None:
        given.values["method"] = EMBEDDING


def _check_sets(given: Given) -> None:
    """Raise UsageError for a key that no kind of recipe has, before the teacher is read."""
    from kdcli.recipe.resolve import check_sets
    from kdcli.verbs.distill.settings import RECIPES

    check_sets(list(RECIPES.values()), given.sets)


def _check_shapes(given: Given) -> None:
    """Raise UsageError for a shape that does not fit, before torch is loaded."""
    from kdcli.models.grammar import goal_of, is_static_shape, parse_shape
    from kdcli.models.source import sizes_on_disk

    if goal_of(given["to"] or []) is not None:
        return

    # With --student, a shape is relative to another model.
    is_relative = given["teacher"] is not None and given["student"] is None
    sizes = sizes_on_disk(given["teacher"]) if is_relative else None
    if sizes is None:
        return
    for text in given["to"] or []:
        # The width of the teacher's vectors is known when the teacher is loaded.
        if not is_static_shape(text):
            parse_shape(text, sizes)


def _detect_task(given: Given) -> None:
    """Set the task that the teacher was trained for, if the options fit a recipe for that task."""
    from kdcli.engine.progress import Progress
    from kdcli.types import task_title
    from kdcli.workloads.detect import task_to_distill

    teacher = given["teacher"]
    task = task_to_distill(teacher, given["data"])
    if task is not None and given.fits(_kind(given, task)):
        given.values["task"] = task
        Progress.log(f"{teacher} is distilled on {task_title(task)}; --method distils its encoder")


def _kind(given: Given, task: str | None) -> str:
    """Return the kind of recipe for a task, or for text."""
    on_task = task is not None or given.kind_of_recipe == "distill-task"
    return given.kind_for(task, "distill-task" if on_task else "distill")


def _on_text(given: Given) -> Printable | None:
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


def _on_task(given: Given) -> Printable | None:
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


def _reranker(given: Given) -> Printable | None:
    from kdcli.recipe.resolve import resolve
    from kdcli.workloads.settings import RerankRecipe

    options, keys = given.run_options, given.keys("rerank")
    resolved = resolve(RerankRecipe, recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.distill.outputs import distill_reranker

    return distill_reranker(resolved, options)
