"""How a model is fine-tuned on a task: the recipe named, else the one shipped for the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdcli.downstream.settings import DownstreamSettings, FinetuneRecipe, OnTask, TaskHeadSettings
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved, flatten, resolve, shipped


def finetune_recipe(
    *, recipe: str | None = None, sets: Sequence[str] = (), options: Mapping[str, Any]
) -> Resolved[FinetuneRecipe]:
    """How a model is fine-tuned: by the recipe that is named, else by the one shipped for the task, if there is one.

    Args:
        recipe, sets, options: as in `resolve`.

    Raises:
        UsageError: see `resolve`.
    """
    resolved = resolve(FinetuneRecipe, recipe=recipe, sets=sets, options=options)
    of_task = resolved.recipe.task
    if recipe is not None or of_task not in shipped("finetune"):
        return resolved
    return resolve(FinetuneRecipe, recipe=of_task, sets=sets, options=options)


def as_finetune(recipe: OnTask, model: str, *, head: TaskHeadSettings | None = None) -> FinetuneRecipe:
    """The part of a task recipe that trains or evaluates one of its models.

    Args:
        head: settings of the model's head; None is the recipe's without `label_map`, which belongs to the teacher.
    """
    shared = {key: getattr(recipe, key) for key in ("task", "keep", "choose_on", "data", "train", "measure")}
    head = head or recipe.head.model_copy(update={"label_map": None})
    return FinetuneRecipe(model=model, head=head, **shared)


def downstream_recipe(settings: DownstreamSettings, task: str, seed: int) -> Resolved[FinetuneRecipe]:
    """How a task of `eval` is fine-tuned on: its shipped recipe if there is one, with the overrides.

    Raises:
        UsageError: an override that `finetune` does not know; a directory of several tasks without this one's.
    """
    source = settings.source
    if source is not None and (Path(source) / task).is_dir():
        source = str(Path(source) / task)
    elif source is not None and Path(source).is_dir() and len(settings.tasks) > 1:
        there = ", ".join(sorted(f"{p.name}/" for p in Path(source).iterdir() if p.is_dir())) or "none"
        raise UsageError(
            f"eval.source={source} has no folder {task}/ for the task {task}; there are {there}",
            "of several tasks each has a folder of its name",
        )
    options = {"task": task, "data.source": source, "train.seed": seed} | dict(flatten(settings.overrides))
    return finetune_recipe(options=options)
