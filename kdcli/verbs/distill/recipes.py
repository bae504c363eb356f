"""Resolve the recipes of a distillation on a task, of its stages and of its variants."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from kdcli.errors import UsageError, did_you_mean
from kdcli.recipe.resolve import (
    Resolved,
    defaulted,
    explain,
    flatten,
    read_recipe,
    resolve,
    shipped,
    verb_of,
)
from kdcli.verbs.distill.settings import DistillRecipe, TaskDistillRecipe
from kdcli.workloads.recipes import finetune_recipe
from kdcli.workloads.settings import FinetuneRecipe, StudentTrainSettings

SOFT_TARGETS = "soft-targets"
RATE_WIDTH = 384
"""The width at which the default learning rates were chosen."""
STATIC_DEFAULTS: dict[str, object] = {
    "train.lr": 3e-3,
    "train.batch_size": 256,
    "train.micro_batch_size": 256,
    "train.epochs": 3.0,
}
"""Defaults if the student is static. A forward pass is cheap, but a gradient is a whole table."""


def at_width(rate: float, width: int) -> float:
    """Return a learning rate that was chosen at `RATE_WIDTH` for another width.

    It is inversely proportional to the width: large steps drive wide students from their start.
    """
    return float(f"{rate * RATE_WIDTH / width:.2g}")


def general_recipe(recipe: TaskDistillRecipe) -> Resolved[DistillRecipe]:
    """Return the recipe of the stage on text.

    It has the keys of `general:`, and the task's teacher, student and seed.
    """
    general, student = recipe.general, recipe.student
    options: dict[str, object] = {
        f"student.{key}": getattr(student, key) for key in ("to", "init", "layers", "dropout")
    }
    options |= {f"train.{key}": getattr(recipe.train, key) for key in ("seed", "dtype")}
    options["relation.kernel"] = recipe.relation.kernel
    options |= {
        "teacher": general.teacher or recipe.teacher,
        "data.source": general.source,
        "measure.latency": False,
    }
    if general.recipe is None:
        # An assistant is only worth its steps if the student on text is the final result.
        loss = {f"loss.{key}": value for key, value in recipe.loss.items()}
        options |= {"method": recipe.method, "assistant": "none"} | loss
    return resolve(
        DistillRecipe, recipe=general.recipe, options=options | dict(flatten(general.overrides))
    )


def task_recipe(
    *,
    recipe: str | None,
    sets: Sequence[str],
    options: Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
) -> Resolved[TaskDistillRecipe]:
    """Resolve the recipe of a distillation on a task.

    The shipped recipe of the method and the task, if there is one, gives the defaults.

    Args:
        recipe: The name or the path of a recipe. A recipe of `distill` on text becomes the stage
            on text.
        sets: Assignments of keys, such as `train.lr=0.01`.
        options: Recipe keys and their values; None for a key that was not given.
        overrides: Keys that win over all others, such as a variant's.

    Raises UsageError: an unknown recipe or key, or a wrong value.
    """
    # This loads numpy, and the help imports this module.
    from kdcli.models.grammar import is_static_shape

    values = {key: value for key, value in options.items() if value is not None}
    values |= overrides or {}
    beneath: dict[str, Mapping[str, object]] = {}
    if recipe is not None and verb_of(recipe) == "distill":
        text = resolve(DistillRecipe, recipe=recipe).recipe
        beneath[f"recipe {recipe}"] = {
            **{
                "general.use": True,
                "general.recipe": recipe,
                "general.teacher": text.teacher,
                "method": text.method,
            },
            **{f"student.{key}": getattr(text.student, key) for key in ("to", "init", "layers")},
            **{f"loss.{key}": value for key, value in text.loss.items()},
        }
        recipe = None
    resolved = resolve(TaskDistillRecipe, recipe=recipe, beneath=beneath, sets=sets, options=values)
    static = any(map(is_static_shape, resolved.recipe.student.to))
    without_states = static or resolved.recipe.soft_labels is not None
    if without_states and "method" not in resolved.origins:
        # Neither a file nor a static student has token states.
        values["method"] = SOFT_TARGETS
        resolved = resolve(
            TaskDistillRecipe, recipe=recipe, beneath=beneath, sets=sets, options=values
        )
    first = resolved.recipe
    name = f"{first.method}-{first.task}"
    if name in shipped("distill-task"):
        beneath = {f"recipe {name}": dict(flatten(read_recipe(name, "distill-task")))} | beneath
    resolved = resolve(TaskDistillRecipe, recipe=recipe, beneath=beneath, sets=sets, options=values)
    if static:
        resolved = defaulted(resolved, STATIC_DEFAULTS, "default of static students")
    # A user who sets one key of this mapping keeps the defaults of the others.
    rest = {
        k: v
        for k, v in TaskDistillRecipe().intermediate.items()
        if k not in resolved.recipe.intermediate
    }
    return defaulted(resolved, {f"intermediate.{k}": v for k, v in rest.items()}, "default")


def ablations(name: str) -> dict[str, dict[str, object]]:
    """Read a list of variants. Returns the dotted keys that each variant overrides, by its name.

    The first variant is the recipe itself.

    Args:
        name: A shipped list (`recipes/ablations/NAME.yaml`), or the path of a YAML file.

    Raises UsageError: there is no such list, or it is not a mapping of mappings.
    """
    known = shipped("ablations")
    path = known.get(name, Path(name))
    if not path.is_file():
        raise UsageError(
            f"no list of variants '{name}'{did_you_mean(name, known)}",
            f"shipped: {', '.join(known)}; or give the path of a YAML file: name: "
            f"{{key.path: value}}",
        )
    listed = read_recipe(str(path), None)
    for key, value in listed.items():
        if not isinstance(value, dict | None):
            raise UsageError(f"{path}: '{key}' must hold a mapping of recipe keys, got {value!r}")
    return {"full": {}} | {str(key): dict(flatten(value or {})) for key, value in listed.items()}


def stage_settings(recipe: TaskDistillRecipe) -> StudentTrainSettings:
    """Return `train:` of the intermediate stage.

    It has the prediction stage's keys, overridden by the keys of `intermediate`.

    Raises UsageError: an unknown key, a wrong value, or a key that all stages share.
    """
    known = list(StudentTrainSettings.model_fields)
    for key in recipe.intermediate:
        if key in ("seed", "dtype"):
            raise UsageError(f"intermediate.{key} cannot be set: all stages share train.{key}")
        if key not in known:
            raise UsageError(
                f"unknown key 'intermediate.{key}'{did_you_mean(key, known)}",
                f"known keys: {', '.join(known)}",
            )
    values = recipe.train.model_dump() | recipe.intermediate
    try:
        return StudentTrainSettings.model_validate(values)
    except ValidationError as error:
        origins = dict.fromkeys(recipe.intermediate, "intermediate")
        raise UsageError("\n".join(explain(error, values, origins))) from None


def undistilled_recipe(recipe: TaskDistillRecipe, student: str) -> Resolved[FinetuneRecipe]:
    """Return the recipe that fine-tunes a student without a teacher.

    It is the task's shipped recipe with the keys of `undistilled.overrides`.
    """
    options: dict[str, object] = {"model": student} | {
        key: getattr(recipe, key) for key in ("task", "keep", "choose_on")
    }
    options |= {
        f"data.{key}": value
        for key, value in recipe.data.model_dump().items()
        if value not in (None, {})
    }
    from kdcli.models.grammar import is_static_shape

    keys = ["seed", "dtype", "max_steps", "eval_every"]
    if any(map(is_static_shape, recipe.student.to)):
        # The rates of finetune are for encoders, and would hardly move a table.
        keys += [key.removeprefix("train.") for key in STATIC_DEFAULTS]
    options |= {f"train.{key}": getattr(recipe.train, key) for key in keys}
    options |= {f"head.{key}": getattr(recipe.head, key) for key in ("kind", "words")}
    return finetune_recipe(options=options | dict(flatten(recipe.undistilled.overrides)))


def embedding_recipe(teacher: str) -> dict[str, dict[str, object]]:
    """Return the shipped recipe for students of an embedding model, by its origin."""
    if teacher == "demo":
        return demo_recipe("embedding", ())
    return {"recipe embedding": dict(flatten(read_recipe("embedding", "distill")))}


def demo_recipe(method: str | None, sets: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return the recipe of `distill demo`, by its origin. Another method gets no loss settings.

    Args:
        method: The value of `--method`.
        sets: The values of `--set`, which may set the method too.
    """
    method = method or dict(each.split("=", 1) for each in sets if "=" in each).get("method")
    name = "demo-embedding" if method == "embedding" else "demo"
    values = dict(flatten(read_recipe(name, "distill")))
    if method not in (None, "minilm", "embedding"):
        values = {key: value for key, value in values.items() if not key.startswith("loss.")}
    return {f"recipe {name}": values}
