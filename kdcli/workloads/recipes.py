"""Recipes of fine-tuning: the named one, the one shipped for a task, or one model's part of another
verb's recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved, flatten, resolve, shipped
from kdcli.workloads.settings import (
    DownstreamSettings,
    FinetuneRecipe,
    LabelledSettings,
    OnTask,
    RerankRecipe,
    TaskHeadSettings,
)


def finetune_recipe(
    *, recipe: str | None = None, sets: Sequence[str] = (), options: Mapping[str, Any]
) -> Resolved[FinetuneRecipe]:
    """The named recipe, else the one shipped for the task, else the defaults; arguments and errors
    as of `resolve`."""
    resolved = resolve(FinetuneRecipe, recipe=recipe, sets=sets, options=options)
    if recipe is None and (task := resolved.recipe.task) in shipped("finetune"):
        return resolve(FinetuneRecipe, recipe=task, sets=sets, options=options)
    return resolved


def as_finetune(
    recipe: OnTask, model: str, *, head: TaskHeadSettings | None = None
) -> FinetuneRecipe:
    """The part of a task recipe that trains or evaluates one of its models. `head`: settings of the
    model's head; None is the recipe's without `label_map`, which belongs to the teacher."""
    shared = {
        key: getattr(recipe, key)
        for key in ("task", "keep", "choose_on", "data", "train", "measure")
    }
    head = head or recipe.head.model_copy(update={"label_map": None})
    return FinetuneRecipe(model=model, head=head, **shared)


def downstream_recipe(
    settings: DownstreamSettings, task: str, seed: int
) -> Resolved[FinetuneRecipe]:
    """The recipe of one task of `eval`: the shipped one, with the overrides. Raises UsageError: an
    override that `finetune` does not know; a directory of several tasks without this one's."""
    source = settings.source
    if source is not None and (Path(source) / task).is_dir():
        source = str(Path(source) / task)
    elif source is not None and Path(source).is_dir() and len(settings.tasks) > 1:
        there = (
            ", ".join(sorted(f"{p.name}/" for p in Path(source).iterdir() if p.is_dir())) or "none"
        )
        message = (
            f"eval.source={source} has no folder {task}/ for the task {task}; there are {there}"
        )
        raise UsageError(message, "with several tasks each needs a folder of its name")
    options = {"task": task, "data.source": source, "train.seed": seed} | dict(
        flatten(settings.overrides)
    )
    return finetune_recipe(options=options)


def rerank_finetuning(recipe: RerankRecipe) -> FinetuneRecipe:
    """The part of a reranker's recipe that fine-tunes one model."""
    data = LabelledSettings(
        source=recipe.data.source,
        max_length=recipe.data.max_length,
        split_seed=recipe.data.split_seed,
    )
    return FinetuneRecipe(
        model=recipe.student.source or recipe.teacher,
        task=recipe.task,
        keep=recipe.keep,
        data=data,
        train=recipe.train,
        measure=recipe.measure,
        workload=recipe.ranking.model_dump(),
    )
