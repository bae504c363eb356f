"""The recipe of `kdcli compress`: its goal and its steps, checked before any loading."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from kdcli.deploy.backends import FORMATS, PACKED, BackendName
from kdcli.errors import UsageError, did_you_mean, in_words
from kdcli.recipe.options import GOAL, OF_OPTIONS, RUN, Option
from kdcli.recipe.resolve import (
    SECTION,
    Resolved,
    flatten,
    recipe_models,
    resolve,
    shipped,
)
from kdcli.recipe.sections import (
    MeasureSettings,
    PricePerHour,
    RecipeValues,
    Section,
    Seed,
)
from kdcli.verbs.compress.limits import LIMITS, GoalSettings, option_of
from kdcli.workloads.settings import LabelledSettings, Pooling, TaskName

ASKS_OR_TRAINS = (
    *("model", "--task", "--data", "--pooling", "--seed", "--recipe", "--set", "--revision"),
    *(option_of(limit.key) for limit in LIMITS),
    *("--strict", "--cascade", "--budget", "--price-per-hour"),
    *("--output-dir", "--overwrite", "--resume"),
)
"""The options of a question or of a training, which printing the candidates would ignore."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(budget: str) -> float:
    """Parse a time such as `30m`.

    Raises:
        UsageError: Another form, or no time at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget takes a time such as 90s, 30m or 2h, got '{budget}'")
    return float(match[1]) * UNITS[match[2]]


def is_onnx(backend: str) -> bool:
    """Whether a backend runs ONNX files, of which cascades are made."""
    return backend.partition("-")[0] == "onnx"


def check_runs_exports(backend: str) -> str:
    """Return the name of a backend that runs exports.

    Raises:
        UsageError: It runs none.
    """
    if backend.partition("-")[0] not in FORMATS:
        raise UsageError(
            f"compress exports its candidates, and {backend} runs no exports",
            f"plan.backends takes {' and '.join(FORMATS)}, such as onnx-int8",
        )
    return backend


def listed_shapes(shapes: object) -> object:
    """Return shapes in one text, such as `3x384,2x384`, as a list."""
    return shapes.split(",") if isinstance(shapes, str) else shapes


class PlanSettings(Section):
    """`plan:`, the candidates of a recipe without steps."""

    backends: list[Annotated[BackendName, AfterValidator(check_runs_exports)]] = Field(
        default_factory=lambda: ["onnx-int8", "openvino-int8", "onnx"], min_length=1
    )
    """Backends that are tried."""
    pack_steps: int = Field(0, ge=0)
    """Number of steps for which the integers of onnx-int8-packed are trained, as with the option
    --steps of export."""
    shapes: Annotated[list[str] | None, BeforeValidator(listed_shapes)] = Field(
        default_factory=list
    )
    """Student shapes that are tried, or a single goal such as 2x or 5ms on the fastest backend;
    none means shapes derived from the model, and null tries no shape."""
    family: bool = False
    """Whether the shapes share their layers and one training, for any goal."""
    finetune: RecipeValues = Field(default_factory=dict)
    """Keys of finetune."""
    distill: RecipeValues = Field(default_factory=dict)
    """Keys of distill (default on a task: method tinybert, stage joint, learning rate 3e-4 at
    width 384, and 1 to 10 epochs, about 90,000 rows in all)."""
    prune: RecipeValues | None = Field(default_factory=dict)
    """Keys of prune, with sparsity 0.9 unless given; null skips pruning."""
    trim_from: float = Field(0.25, ge=0, le=1)
    """Share of the embeddings among the parameters above which the vocabulary is trimmed too; 1
    trims none."""
    undistilled: bool = False
    """Whether the last shape is trained without its teacher as well, to show what the teacher
    adds."""


class CompressData(LabelledSettings):
    """`data:` of `compress`."""

    selection_rows: int = Field(2000, gt=0)
    """Number of rows that choose among candidates: the default takes at most a tenth of the
    training rows, another number at most a third."""
    verification_rows: int = Field(5000, gt=0)
    """Number of rows that score the chosen model, once, at the end: the default takes the test
    split, or the validation split and training rows up to this number, at most a fifth; another
    number takes at most a third of the training rows."""


class CompressRecipe(Section):
    """A recipe of `kdcli compress`."""

    verb: Literal["compress"] = "compress"
    model: Annotated[str | None, Option("model", metavar="MODEL", values="model")] = None
    """Model: a hub id, a directory, 'demo' or 'demo-classifier'; fine-tuned or not."""
    task: TaskName = None
    text: str | None = None
    """Text on which an embedding model is distilled (default: the task's data)."""
    pooling: Pooling = None
    budget: Annotated[
        float | None,
        Option("--budget", panel=GOAL, kind=str, parse=seconds_of, metavar="TIME"),
    ] = Field(None, gt=0)
    """Time limit, such as 90s, 30m or 2h (default: none)."""
    goal: GoalSettings = GoalSettings()
    steps: list[dict[str, RecipeValues]] = Field(default_factory=list)
    """Pipeline: each step maps distill, prune, trim, quantize or export to its keys; none means
    that candidates are planned."""
    plan: PlanSettings = PlanSettings()
    data: CompressData = CompressData()
    seed: Seed = 0
    price_per_hour: PricePerHour = None
    measure: MeasureSettings = MeasureSettings(min_runs=30, min_seconds=3.0)

    def check_parts(self) -> None:
        _check_steps(self)


@dataclass(frozen=True, config=OF_OPTIONS)
class CompressOptions:
    """Options of `kdcli compress` that are no recipe keys."""

    front: Annotated[
        Path | None,
        Option(
            "--front",
            panel=RUN,
            metavar="RUN",
            excludes=ASKS_OR_TRAINS,
        ),
    ] = None
    """Print all candidates of a finished run, and stop."""


RECIPES: dict[str, type[Section]] = {"compress": CompressRecipe}
"""Folder of `recipes/` -> settings model."""
OPTIONS = {"compress": CompressOptions}


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
    from kdcli.workloads.detect import as_trained

    resolved = as_trained(resolved, given.model, trains=False)
    source = resolved.recipe.data.source
    if given.data.source is None and source is not None:
        from kdcli.messages import log

        log(f"no --data given: using {source}, as the recipe {recipe} says")
    if given.task is None:
        resolved = Resolved(resolved.recipe, {**resolved.origins, "task": BY_MODEL})
    _check_goal(resolved.recipe)
    resolved.recipe.check_parts()
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
    if goal.cascade and not goal.max_drop:
        raise UsageError(
            "--cascade bounds how many answers change by --max-drop, which is "
            + ("not given" if goal.max_drop is None else "0: no number of rows can show that"),
            "add --max-drop 0.5, for example",
        )
    if goal.cascade and (recipe.steps or not any(map(is_onnx, recipe.plan.backends))):
        what = "a recipe with steps has one" if recipe.steps else "plan.backends has no ONNX file"
        raise UsageError(
            f"--cascade joins two candidates in ONNX files, and {what}",
            "remove steps" if recipe.steps else "add onnx or onnx-int8 to plan.backends",
        )
    if recipe.plan.pack_steps and f"onnx-{PACKED}" not in recipe.plan.backends:
        raise UsageError(
            f"plan.pack_steps trains the integers of onnx-{PACKED}, and plan.backends has "
            f"{', '.join(recipe.plan.backends)}",
            f"add onnx-{PACKED} to plan.backends, or remove plan.pack_steps",
        )
    # This import loads numpy, and help imports this module.
    from kdcli.models.grammar import goal_of, is_static_shape, match_shape

    shapes = recipe.plan.shapes or []
    is_goal = goal_of(shapes) is not None
    for shape in shapes:
        if not is_goal and not is_static_shape(shape):
            match_shape(shape)
    if recipe.plan.family and (recipe.steps or is_goal):
        one = "a recipe with steps" if recipe.steps else f"plan.shapes={shapes[0]}"
        raise UsageError(
            f"plan.family trains several shapes at once, and {one} has one candidate",
            "remove one of them",
        )
    if recipe.plan.family and recipe.plan.shapes is None:
        raise UsageError(
            "plan.family trains several shapes at once, and plan.shapes=null has none",
            "name shapes, or remove one of them",
        )
    if recipe.steps and recipe.budget is not None:
        raise UsageError(
            "--budget chooses among candidates, and a recipe with steps has one",
            "remove --budget",
        )


def _check_steps(recipe: CompressRecipe) -> None:
    """Check the keys of the planned verbs and of every step.

    Raises:
        UsageError: An unknown step or key, or a value of the wrong type.
    """
    planned = {
        "finetune": recipe.plan.finetune,
        "distill": recipe.plan.distill,
        "prune": recipe.plan.prune or {},
    }
    for name, keys in planned.items():
        _check_keys(name, keys, f"plan.{name}")
    for index, step in enumerate(recipe.steps):
        item = f"steps[{index}]"
        if len(step) != 1:
            got = ", ".join(step) or "an empty step"
            raise UsageError(f"{in_words(item)} must name one of {', '.join(STEPS)}, got {got}")
        ((name, keys),) = step.items()
        if name not in STEPS:
            raise UsageError(
                f"{in_words(f'{item}.{name}')} is no step{did_you_mean(name, STEPS)}",
                f"known: {', '.join(STEPS)}",
            )
        _check_keys(name, keys, f"{item}.{name}")


def _check_keys(name: str, keys: RecipeKeys, section: str) -> None:
    """Check the keys of a planned verb or of a step, which stand in a section of the recipe."""
    if name not in EXPORTS:
        if not isinstance(named := keys.get("recipe"), str | None):
            raise UsageError(
                f"{in_words(f'{section}.recipe')} must be the name of a recipe or the path of a "
                f"file, got {named!r}"
            )
        above = {f"{SECTION}{section}": dotted(keys)}
        resolve(recipe_models()[name], recipe=named, above=above)
        return
    if wrong := next((key for key in keys if key not in EXPORT_KEYS), None):
        raise UsageError(
            f"unknown key {in_words(f'{section}.{wrong}')}", f"known: {', '.join(EXPORT_KEYS)}"
        )
    if (format := keys.get("format", FORMATS[0])) not in FORMATS:
        raise UsageError(
            f"{in_words(f'{section}.format')}: unknown format {format!r}",
            f"allowed: {', '.join(FORMATS)}",
        )


def backend_of(verb: str, keys: RecipeKeys) -> str:
    """Return the backend of a step `quantize` or `export`, such as `onnx-int8`."""
    return f"{keys.get('format', FORMATS[0])}{'-int8' if verb == 'quantize' else ''}"


def base_recipe(keys: RecipeKeys) -> str | None:
    """Return the recipe that a step starts from; None without one."""
    named = keys.get("recipe")
    assert named is None or isinstance(named, str)
    return named


def dotted(keys: RecipeKeys) -> RecipeValues:
    """Return the nested keys of a step as dotted recipe keys, without keys that set nothing."""
    own = {key: value for key, value in keys.items() if key != "recipe"}
    return {key: value for key, value in flatten(own) if value not in (None, {}, [])}
