"""Fine-tuning recipes: given by the user, shipped for a task, or derived from another recipe."""

from collections.abc import Mapping, Sequence
from functools import partial

from kdcli.disk import user_path
from kdcli.errors import UsageError
from kdcli.recipe.resolve import SECTION, Resolved, resolve, shipped
from kdcli.workloads.settings import (
    DownstreamSettings,
    FinetuneRecipe,
    OnTask,
    TaskHeadSettings,
)


def finetune_recipe(
    *,
    recipe: str | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, object],
    above: Mapping[str, Mapping[str, object]] | None = None,
) -> Resolved[FinetuneRecipe]:
    """Resolve a fine-tuning recipe.

    Without `recipe`, use the recipe that is shipped for the task. Other tasks use the defaults.

    Args:
        recipe: Name or file of a recipe.
        sets: Values of `--set`.
        options: Recipe key -> value of an option.
        above: Values that override the options, by origin.

    Raises:
        UsageError: The recipe cannot be read, or a key or value is not allowed.
    """
    read = partial(resolve, FinetuneRecipe, sets=sets, options=options, above=above)
    resolved = read(recipe=recipe)
    if recipe is None and (task := resolved.recipe.task) in shipped("finetune"):
        return read(recipe=task)
    return resolved


def as_finetune(
    recipe: OnTask, model: str, *, head: TaskHeadSettings | None = None
) -> FinetuneRecipe:
    """Derive the fine-tuning recipe for one model of another verb's recipe.

    Args:
        recipe: The verb's recipe.
        model: The model.
        head: Settings of the model's head. None uses the recipe's settings without `label_map`,
            which belongs to the teacher.
    """
    shared = {
        key: getattr(recipe, key)
        for key in ("task", "keep", "choose_on", "workload", "data", "train", "measure")
    }
    head = head or recipe.head.model_copy(update={"label_map": None})
    return FinetuneRecipe(model=model, head=head, **shared)


def eval_source(settings: DownstreamSettings, task: str) -> str | None:
    """Return the data of one task of the `eval` section: its folder in `eval.source`, if any.

    Args:
        settings: The `eval` section.
        task: The task.

    Raises:
        UsageError: `eval.source` has no folder for the task although there are several tasks.
    """
    source = settings.source
    if source is None or not (folder := user_path(source)).is_dir():
        return source
    if (folder / task).is_dir():
        return str(folder / task)
    if len(settings.tasks) > 1:
        folders = sorted(f"{p.name}/" for p in folder.iterdir() if p.is_dir())
        raise UsageError(
            f"eval.source={source} has no folder {task}/ for the task {task}; there are "
            f"{', '.join(folders) or 'none'}",
            "with several tasks, add one folder per task, named after the task",
        )
    return source


def downstream_recipe(
    settings: DownstreamSettings, task: str, seed: int
) -> Resolved[FinetuneRecipe]:
    """Resolve the fine-tuning recipe for one task of the `eval` section.

    This is the shipped recipe for the task with the section's overrides.

    Args:
        settings: The `eval` section.
        task: The task.
        seed: The training seed.

    Raises:
        UsageError: An override is not a key of `finetune`, or `eval.source` has no folder for the
            task although there are several tasks.
    """
    options = {
        "task": task,
        "data.source": eval_source(settings, task),
        "train.seed": seed,
    }
    above = {f"{SECTION}eval.overrides": settings.overrides}
    return finetune_recipe(options=options, above=above)
