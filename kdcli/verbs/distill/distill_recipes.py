"""Resolve the recipes of a distillation, of its stages and of its variants."""

from collections.abc import Mapping, Sequence
from functools import partial

from pydantic import ValidationError

from kdcli.errors import UsageError, did_you_mean
from kdcli.recipe.resolve import (
    SECTION,
    Resolved,
    explain,
    read_recipe,
    recipe_keys,
    resolve,
    set_among,
    shipped,
)
from kdcli.verbs.distill.settings import (
    EMBEDDING,
    ON_TEXT,
    ONLY_ON_TASK,
    STATIC_DEFAULTS,
    DistillRecipe,
    DistillTrainSettings,
)
from kdcli.workloads.finetune_recipes import finetune_recipe
from kdcli.workloads.settings import FinetuneRecipe, LabelledSettings


def general_recipe(recipe: DistillRecipe) -> Resolved[DistillRecipe]:
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
    above = {f"{SECTION}general.overrides": general.overrides}
    return resolve(DistillRecipe, recipe=general.recipe, options=options, above=above)


def distill_recipe(
    *,
    recipe: str | None,
    sets: Sequence[str] = (),
    options: Mapping[str, object],
    above: Mapping[str, Mapping[str, object]] | None = None,
) -> Resolved[DistillRecipe]:
    """Resolve the recipe of a distillation.

    A shipped recipe gives defaults: on a task, the recipe of the method and the task if there is
    one, and on text, the recipe of the embedded teacher. An embedding model is distilled by its
    method.

    Args:
        recipe: The name or the path of a recipe. With a task, a recipe on text becomes the stage on
            text.
        sets: Assignments of keys, such as `train.lr=0.01`.
        options: Recipe keys and their values; None for a key that was not given.
        above: Values that override the options, such as a variant's, by origin.

    Raises:
        UsageError: An unknown recipe or key, or a wrong value.
    """
    values = {key: value for key, value in options.items() if value is not None}
    read = partial(resolve, DistillRecipe, sets=sets, options=values, above=above)
    resolved = read(recipe=recipe)
    first, beneath = resolved.recipe, dict[str, Mapping[str, object]]()
    if first.task is None:
        if recipe is None and first.teacher == "demo":
            beneath = demo_recipe(first.method if "method" in resolved.origins else None)
        elif "method" not in resolved.origins and first.teacher is not None:
            # This import loads torch.
            from kdcli.models.embedding_format import is_embedder

            if is_embedder(first.teacher):
                beneath = {"the teacher is an embedding model": {"method": EMBEDDING}}
        return read(recipe=recipe, beneath=beneath)
    if recipe is not None and _is_on_text(recipe):
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
        resolved = read(recipe=None, beneath=beneath)
    name = f"{resolved.recipe.method}-{first.task}"
    if name in shipped("distill"):
        beneath = {f"recipe {name}": recipe_keys(name, "distill")} | beneath
    return read(recipe=recipe, beneath=beneath)


def _is_on_text(recipe: str) -> bool:
    """Return whether a recipe is for a distillation on text: it sets nothing that a task needs."""
    resolved = resolve(DistillRecipe, recipe=recipe)
    if resolved.recipe.task is not None or resolved.recipe.method not in ON_TEXT:
        return False
    was_on_task = read_recipe(recipe, "distill").get("verb") == "distill-task"
    return not was_on_task and set_among(resolved, ONLY_ON_TASK) is None


def stage_settings(recipe: DistillRecipe) -> DistillTrainSettings:
    """Return `train:` of the intermediate stage.

    It has the prediction stage's keys, overridden by the keys of `intermediate`.

    Raises:
        UsageError: An unknown key, a wrong value, or a key that all stages share.
    """
    known = list(DistillTrainSettings.model_fields)
    for key in recipe.intermediate:
        if key in ("seed", "dtype"):
            raise UsageError(f"intermediate.{key} cannot be set: all stages share train.{key}")
        if key not in known:
            raise UsageError(
                f"unknown key 'intermediate.{key}'{did_you_mean(key, known, 'intermediate.')}",
                f"known keys: {', '.join(known)}",
            )
    values = recipe.train.model_dump() | recipe.intermediate
    try:
        return DistillTrainSettings.model_validate(values)
    except ValidationError as error:
        origins = dict.fromkeys(recipe.intermediate, f"{SECTION}intermediate")
        raise UsageError("\n".join(explain(error, values, origins))) from None


def undistilled_recipe(recipe: DistillRecipe, student: str) -> Resolved[FinetuneRecipe]:
    """Return the recipe that fine-tunes a student without a teacher.

    It is the task's shipped recipe with the keys of `undistilled.overrides`.
    """
    options: dict[str, object] = {"model": student} | {
        key: getattr(recipe, key) for key in ("task", "keep", "choose_on")
    }
    options |= {
        f"data.{key}": value
        for key, value in recipe.data.model_dump(include=set(LabelledSettings.model_fields)).items()
        if value not in (None, {})
    }
    from kdcli.models.grammar import is_static_shape

    keys = ["seed", "dtype", "max_steps", "eval_every"]
    if any(map(is_static_shape, recipe.student.to)):
        # The rates of finetune are for encoders, and would hardly move a table.
        keys += [key.removeprefix("train.") for key in STATIC_DEFAULTS]
    options |= {f"train.{key}": getattr(recipe.train, key) for key in keys}
    options |= {f"head.{key}": getattr(recipe.head, key) for key in ("kind", "words")}
    above = {f"{SECTION}undistilled.overrides": recipe.undistilled.overrides}
    return finetune_recipe(options=options, above=above)


def embedding_recipe(teacher: str) -> str:
    """Return the name of the shipped recipe for students of an embedding model."""
    return "demo-embedding" if teacher == "demo" else "embedding"


def demo_recipe(method: str | None) -> dict[str, Mapping[str, object]]:
    """Return the recipe of `distill demo`, by its origin. Another method gets no loss settings.

    Args:
        method: The method, or None if the user chose none.
    """
    name = embedding_recipe("demo") if method == EMBEDDING else "demo"
    values = recipe_keys(name, "distill")
    if method not in (None, "minilm", EMBEDDING):
        values = {key: value for key, value in values.items() if not key.startswith("loss.")}
    return {f"recipe {name}": values}
