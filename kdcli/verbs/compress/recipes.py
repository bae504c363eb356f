"""The recipe of a command line: its goal and the keys of its steps, checked before any loading."""

from collections.abc import Mapping, Sequence

from kdcli.deploy.backends import FORMATS, check_format
from kdcli.errors import UsageError, did_you_mean
from kdcli.recipe.resolve import Resolved, flatten, recipe_models, resolve, shipped
from kdcli.recipe.sections import RecipeValues
from kdcli.verbs.compress.limits import LIMITS, option_of
from kdcli.verbs.compress.settings import CompressRecipe

BY_MODEL = "the model's files"
"""The origin of a task that the user did not name."""
RecipeKeys = Mapping[str, object]
"""Keys of a verb's recipe, nested or dotted. `recipe` names another recipe to start from."""
STEPS = ("distill", "prune", "trim", "quantize", "export")
EXPORTS, EXPORT_KEYS = ("quantize", "export"), ("format",)
DETECTED = {
    "own": "a fine-tuned model, compressed on the rows of --data",
    "embedding": "an embedding model, compared with itself on the texts of --data",
    "rerank": "a reranker, compressed on the queries of --data",
    "retrieval": "an embedding model, scored on the retrieval data of --data",
}
"""Task that was found from the model and the data -> its description for the log."""


def detected(task: str) -> str:
    """Describe a task that was found from the model and the data."""
    return DETECTED.get(task, f"task {task}, on which it was trained")


def compress_recipe(
    *, recipe: str | None, sets: Sequence[str], options: Mapping[str, object]
) -> Resolved[CompressRecipe]:
    """Resolve the named recipe, else `compress-MODEL` or `compress-TASK`, else the defaults.

    If no task is given, the model and the data decide it; see `task_of_model`.

    Raises UsageError: a recipe, goal or step that cannot be used.
    """
    resolved = resolve(CompressRecipe, recipe=recipe, sets=sets, options=options)
    if resolved.recipe.model is None:
        raise UsageError("no model given", "kdcli compress MODEL --data texts.txt --max-drop 3")
    given = resolved.recipe
    task = given.task
    if task is None:
        _check_goal(given)
        from kdcli.workloads.detect import task_of_model

        task = task_of_model(str(given.model), given.data.source, given.pooling)
    if recipe is None:
        names = (f"compress-{given.model}", f"compress-{task}")
        recipe = next((name for name in names if name in shipped("compress")), None)
    options = {**options, "task": task}
    resolved = resolve(CompressRecipe, recipe=recipe, sets=sets, options=options)
    if given.task is None:
        resolved = Resolved(resolved.recipe, {**resolved.origins, "task": BY_MODEL})
    _check_goal(resolved.recipe)
    _check_steps(resolved.recipe)
    return resolved


def _check_goal(recipe: CompressRecipe) -> None:
    goal = recipe.goal
    if not goal.limits and not recipe.steps:
        *first, last = [option_of(limit.key) for limit in LIMITS]
        raise UsageError(
            "no goal given", f"add {', '.join(first)} or {last}; or a recipe with steps"
        )
    if goal.strict and goal.max_drop is None:
        raise UsageError(
            "--strict is about --max-drop, which is not given",
            "add --max-drop, or remove --strict",
        )
    if recipe.steps and recipe.budget is not None:
        raise UsageError(
            "--budget chooses among candidates, and a recipe with steps has one",
            "remove --budget",
        )


def _check_steps(recipe: CompressRecipe) -> None:
    """Check the keys of the planned verbs and of every step.

    Raises UsageError: an unknown step or key, or a value of the wrong type.
    """
    planned = {
        "finetune": recipe.plan.finetune,
        "distill": recipe.plan.distill,
        "prune": recipe.plan.prune or {},
    }
    for number, step in enumerate(
        [*({k: v} for k, v in planned.items()), *recipe.steps], 1 - len(planned)
    ):
        if len(step) != 1:
            got = ", ".join(step) or "an empty step"
            raise UsageError(f"steps: step {number} must name one of {', '.join(STEPS)}, got {got}")
        ((name, keys),) = step.items()
        where = f"steps: step {number}, {name}" if number > 0 else f"plan.{name}"
        if number > 0 and name not in STEPS:
            raise UsageError(
                f"{where}: no such step{did_you_mean(name, STEPS)}", f"known: {', '.join(STEPS)}"
            )
        if name in EXPORTS:
            if wrong := next((key for key in keys if key not in EXPORT_KEYS), None):
                raise UsageError(
                    f"{where}: unknown key '{wrong}'", f"known: {', '.join(EXPORT_KEYS)}"
                )
            try:
                check_format(str(keys.get("format", FORMATS[0])))
            except UsageError as unknown:
                raise unknown.of(where) from None
            continue
        try:
            resolve(recipe_models()[name], recipe=base_recipe(keys), options=dotted(keys))
        except UsageError as wrong:
            raise wrong.of(where) from None


def backend_of(verb: str, keys: RecipeKeys) -> str:
    """Return the backend of a step `quantize` or `export`, such as `onnx-int8`."""
    return f"{keys.get('format', FORMATS[0])}{'-int8' if verb == 'quantize' else ''}"


def base_recipe(keys: RecipeKeys) -> str | None:
    """Return the recipe that a step starts from; None without one.

    Raises UsageError: `recipe` is no text.
    """
    named = keys.get("recipe")
    if named is None or isinstance(named, str):
        return named
    raise UsageError(f"recipe must be the name of a recipe or the path of a file, got {named!r}")


def dotted(keys: RecipeKeys) -> RecipeValues:
    """Return the nested keys of a step as dotted recipe keys, without keys that set nothing."""
    own = {key: value for key, value in keys.items() if key != "recipe"}
    return {key: value for key, value in flatten(own) if value not in (None, {}, [])}
