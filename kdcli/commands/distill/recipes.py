"""The recipes of a task's distillation: of the method on the task, of its stages, of its variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kdcli.commands.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.downstream.recipes import finetune_recipe
from kdcli.downstream.settings import FinetuneRecipe, FinetuneTrainSettings
from kdcli.errors import UsageError, did_you_mean
from kdcli.recipe.resolve import Resolved, defaulted, explain, flatten, read_recipe, resolve, shipped, verb_of


def general_recipe(recipe: TaskDistillRecipe) -> Resolved[DistillRecipe]:
    """The distillation on text that a task's begins with: of `general`, with the task's teacher, student and seed.

    Raises:
        UsageError: an override that `distill` does not know, or a recipe that is not there.
    """
    of = recipe.general
    options: dict[str, Any] = {
        "teacher": of.teacher or recipe.teacher,
        "student.to": recipe.student.to,
        "student.init": recipe.student.init,
        "student.layers": recipe.student.layers,
        "data.source": of.source,
        "train.seed": recipe.train.seed,
        "train.dtype": recipe.train.dtype,
        "measure.latency": False,
    }
    if of.recipe is None:
        # One leg; an assistant is worth its steps where the student on text is what is wanted.
        options |= {"method": recipe.method, "assistant": "none"} | {
            f"loss.{key}": value for key, value in recipe.loss.items()
        }
    return resolve(DistillRecipe, recipe=of.recipe, options=options | dict(flatten(of.overrides)))


def task_recipe(
    *, recipe: str | None, sets: Sequence[str], options: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Resolved[TaskDistillRecipe]:
    """The recipe of a task's distillation: what is known of the method on the task lies beneath what was given.

    Args:
        recipe: of a task's distillation, or one of `distill`, which then is the stage on text before the task's own.
        sets, options: as in `resolve`.
        overrides: options that win over all of these, such as those of a variant.

    Raises:
        UsageError: see `resolve`.
    """
    given = {key: value for key, value in options.items() if value is not None} | dict(overrides or {})
    beneath: dict[str, Mapping[str, Any]] = {}
    if recipe is not None and verb_of(recipe) == "distill":
        text = resolve(DistillRecipe, recipe=recipe).recipe
        beneath[f"recipe {recipe}"] = {
            **{"general.use": True, "general.recipe": recipe, "general.teacher": text.teacher, "method": text.method},
            **{"student.to": text.student.to, "student.init": text.student.init, "student.layers": text.student.layers},
            **{f"loss.{key}": value for key, value in text.loss.items()},
        }
        recipe = None
    first = resolve(TaskDistillRecipe, recipe=recipe, beneath=beneath, sets=sets, options=given).recipe
    of_task = f"{first.method}-{first.task}"
    if of_task in shipped("distill-task"):
        beneath = {f"recipe {of_task}": dict(flatten(read_recipe(of_task, "distill-task")))} | beneath
    resolved = resolve(TaskDistillRecipe, recipe=recipe, beneath=beneath, sets=sets, options=given)
    # Whoever sets one key of this mapping has not said that the others are without a value.
    stage = TaskDistillRecipe().intermediate
    rest = {f"intermediate.{k}": v for k, v in stage.items() if k not in resolved.recipe.intermediate}
    return defaulted(resolved, rest, "default")


def ablations(name: str) -> dict[str, dict[str, Any]]:
    """Variants of a task's distillation: name of each → what it overrides, dotted; the first is the recipe as it is.

    Args:
        name: a shipped list (`recipes/ablations/NAME.yaml`) or a YAML file of the same form.

    Raises:
        UsageError: no such list, or not of that form.
    """
    there = shipped("ablations")
    path = there.get(name, Path(name))
    if not path.is_file():
        raise UsageError(
            f"no list of variants '{name}'{did_you_mean(name, there)}",
            f"shipped: {', '.join(there)}; or give the path of a YAML file: name: {{key.path: value}}",
        )
    found = read_recipe(str(path), None)
    wrong = [key for key, value in found.items() if not isinstance(value, dict | None)]
    if wrong:
        raise UsageError(f"{path}: '{wrong[0]}' must hold a mapping of recipe keys, got {found[wrong[0]]!r}")
    return {"full": {}} | {str(key): dict(flatten(value or {})) for key, value in found.items()}


def stage_settings(recipe: TaskDistillRecipe) -> FinetuneTrainSettings:
    """The `train:` of a task's intermediate stage: that of the prediction stage with what `intermediate` says.

    Raises:
        UsageError: a key or value that `train:` does not take, or one that all stages share.
    """
    shared = {"seed", "dtype"} & set(recipe.intermediate)
    if shared:
        raise UsageError(f"intermediate.{min(shared)} cannot be set: all stages share train.{min(shared)}")
    for key in recipe.intermediate:
        if key not in FinetuneTrainSettings.model_fields:
            known = list(FinetuneTrainSettings.model_fields)
            raise UsageError(
                f"unknown key 'intermediate.{key}'{did_you_mean(key, known)}", f"known keys: {', '.join(known)}"
            )
    values = recipe.train.model_dump() | recipe.intermediate
    try:
        return FinetuneTrainSettings.model_validate(values)
    except ValidationError as error:
        origins = dict.fromkeys(recipe.intermediate, "intermediate")
        raise UsageError("\n".join(explain(error, values, origins))) from None


def undistilled_recipe(recipe: TaskDistillRecipe, student: str) -> Resolved[FinetuneRecipe]:
    """How a task's student is fine-tuned without a teacher: the task's shipped recipe, with the overrides.

    Raises:
        UsageError: an override that `finetune` does not know.
    """
    options: dict[str, Any] = {
        "task": recipe.task,
        "model": student,
        "keep": recipe.keep,
        "choose_on": recipe.choose_on,
    }
    options |= {f"data.{key}": value for key, value in recipe.data.model_dump().items() if value not in (None, {})}
    options |= {f"train.{key}": getattr(recipe.train, key) for key in ("seed", "dtype", "max_steps", "eval_every")}
    options |= {f"head.{key}": getattr(recipe.head, key) for key in ("kind", "words")}
    return finetune_recipe(options=options | dict(flatten(recipe.undistilled.overrides)))
