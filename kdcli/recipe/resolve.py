"""YAML, `--set` and options -> strict settings, with the origin of each value and did-you-mean for each wrong key.

Precedence: option > `--set` > recipe > default.
"""

import copy
import importlib
import itertools
import math
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kdcli.disk import unprintable
from kdcli.errors import UsageError, did_you_mean, shortened
from kdcli.recipe.sections import Section
from kdcli.recipe.yaml import MOST_CHARACTERS, one_line, read_yaml

MOST_PROBLEMS = 20  # Lines of an error
RecipeT = TypeVar("RecipeT", bound=Section)
MOST_KEY = 128  # Characters of a key; PyYAML writes longer ones in another form


@dataclass(frozen=True)
class Resolved(Generic[RecipeT]):
    """A validated recipe, and the origin of each dotted key that somebody set."""

    recipe: RecipeT
    origins: Mapping[str, str] = field(default_factory=dict)

    def to_yaml(self) -> str:
        """The whole recipe as YAML that `--recipe` reads back, each origin as a comment."""
        return "\n".join(_lines(self.recipe.model_dump(), self.origins, "", 0)) + "\n"


def resolve(
    model: type[RecipeT],
    *,
    recipe: str | None,
    beneath: Mapping[str, Mapping[str, Any]] | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Resolved[RecipeT]:
    """Merge a recipe, `--set` pairs and options over the defaults of the verb's settings model.

    Args:
        recipe: a shipped recipe's name, a YAML file, or None.
        beneath: origin -> dotted values below `recipe`, later ones over earlier ones.
        sets: `key.path=value`; the value is YAML.
        options: dotted key -> value; None means not given.

    Raises:
        UsageError: unknown recipe or key, wrong type, malformed YAML; one line a problem.
    """
    verb = model.model_fields["verb"].default
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def put(key: str, value: Any, origin: str) -> None:
        if value == {} and any(leaf.startswith(f"{key}.") for leaf in leaf_keys(model)):
            return
        _check_key(model, key, origin)
        _check_names(key, value, origin)
        target = values
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise UsageError(
                    f"'{key}' ({origin}) lies under '{parent}', which was given the value {target!r}"
                )
        target[last] = value
        origins[key] = origin

    laid = dict(beneath or {})
    if recipe is not None:
        laid[f"recipe {recipe}"] = dict(flatten(read_recipe(recipe, verb)))
    for origin, of_origin in laid.items():
        for key, value in of_origin.items():
            put(key, value, origin)
    for pair in sets:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--set takes KEY.PATH=VALUE, got '{pair}'")
        put(key.strip(), _parse_value(text), "--set")
    for key, value in (options or {}).items():
        if value is not None:
            put(key, value, "option")
    return Resolved(_validated(model, values, origins), origins)


def _validated(
    model: type[RecipeT], values: Mapping[str, Any], origins: Mapping[str, str]
) -> RecipeT:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(explain(error, values, origins))) from None


def defaulted(
    resolved: Resolved[RecipeT], values: Mapping[str, Any], origin: str
) -> Resolved[RecipeT]:
    """The recipe with other defaults, such as a method's own, for keys that nobody set."""
    changes = {key: value for key, value in values.items() if key not in resolved.origins}
    recipe = type(resolved.recipe).model_validate(_with(resolved.recipe.model_dump(), changes))
    return Resolved(recipe, {**resolved.origins, **dict.fromkeys(changes, origin)})


def _with(tree: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's values with some dotted keys set."""
    changed = copy.deepcopy(tree)
    for key, value in values.items():
        *parents, last = key.split(".")
        target = changed
        for parent in parents:
            target = target[parent]
        target[last] = value
    return changed


def grid_options(model: type[Section], pairs: Sequence[str]) -> dict[str, list[Any]]:
    """`--grid KEY=V1,V2` -> options below `grid`; `lr` is short for `train.lr`. Raises UsageError: another form, or an
    unknown key."""
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not text:
            raise UsageError(
                f"--grid takes KEY=VALUE,VALUE…, got '{pair}'",
                "for example --grid lr=2e-5,3e-5,5e-5",
            )
        key = key.strip().replace("-", "_")
        if f"train.{key}" in leaf_keys(model):
            key = f"train.{key}"
        _check_key(model, key, "--grid")
        if f"grid.{key}" in found:
            raise UsageError(f"--grid {key} is given twice", "list all its values in one option")
        found[f"grid.{key}"] = [_parse_value(value) for value in text.split(",")]
    return found


def gates(pairs: Sequence[str]) -> dict[str, float]:
    """`--min-metric METRIC=VALUE` -> {metric: value}. Raises UsageError: another form."""
    found = {}
    for pair in pairs:
        metric, _, text = pair.partition("=")
        value = _parse_value(text)
        if (
            not metric
            or isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise UsageError(
                f"--min-metric takes METRIC=VALUE, got '{pair}'",
                "for example --min-metric accuracy=0.9",
            )
        found[metric.strip()] = float(value)
    return found


def combinations(resolved: Resolved[RecipeT]) -> list[tuple[dict[str, Any], Resolved[RecipeT]]]:
    """Every combination of `grid`: the values set, and the recipe with them and without grid and seeds. Raises
    UsageError: an unknown key, no list, or a value of the wrong type."""
    values = resolved.recipe.model_dump()
    lists = flatten(values.pop("grid"))
    if values["train"]["max_steps"] and "train.epochs" in dict(lists):
        raise UsageError(
            "grid.train.epochs changes nothing beside train.max_steps", "leave one of them out"
        )
    for key, choices in lists:
        _check_key(type(resolved.recipe), key, "grid")
        if not isinstance(choices, list) or not choices:
            raise UsageError(f"grid.{key} must hold a list of values, got {choices!r}")
    found = []
    for chosen in itertools.product(*(choices for _, choices in lists)):
        settings = dict(zip((key for key, _ in lists), chosen, strict=True))
        changed = _with(values | {"grid": {}, "seeds": 1}, settings)
        origins = {k: o for k, o in resolved.origins.items() if not k.startswith(("grid", "seeds"))}
        origins |= dict.fromkeys(settings, "grid")
        found.append(
            (settings, Resolved(_validated(type(resolved.recipe), changed, origins), origins))
        )
    return found


def shipped(verb: str) -> dict[str, Path]:
    """Name -> file of the recipes shipped for a verb."""
    folder = _recipes_folder() / verb
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def recipe_names() -> list[str]:
    """Names of all shipped recipes, which take no settings model to list."""
    return sorted(
        {p.stem for p in _recipes_folder().glob("*/*.yaml") if p.parent.name != "ablations"}
    )


def _recipes_folder() -> Path:
    """`recipes/` inside the package in a wheel, beside it in a checkout or an editable install."""
    package = Path(__file__).parents[1]
    shipped_inside = package / "recipes"
    return shipped_inside if shipped_inside.is_dir() else package.parent / "recipes"


def recipe_models() -> dict[str, type[Section]]:
    """Kind of recipe -> its settings model: `RECIPES` of every `kdcli/verbs/VERB/settings.py`."""
    found: dict[str, type[Section]] = {}
    for path in sorted((Path(__file__).parents[1] / "verbs").glob("*/settings.py")):
        found |= importlib.import_module(f"kdcli.verbs.{path.parent.name}.settings").RECIPES
    return found


def read_recipe(recipe: str, verb: str | None) -> dict[str, Any]:
    """The unchecked content of a recipe file. `recipe`: name of a recipe shipped for the verb, or a path. `verb`: None
    accepts only a path. Raises UsageError: no such recipe, or no mapping of keys."""
    names = shipped(verb) if verb else {}
    path = names.get(recipe, Path(recipe))
    if not path.is_file():
        raise UsageError(
            f"no recipe '{recipe}' for {verb}{did_you_mean(recipe, names)}",
            f"shipped recipes: {', '.join(names)}; or give the path of a YAML file",
        )
    try:
        if path.stat().st_size > MOST_CHARACTERS:
            raise ValueError(f"{path.stat().st_size:,} bytes; at most {MOST_CHARACTERS:,} are read")
        loaded = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} must hold a mapping of keys, got {type(loaded).__name__}")
    if verb and loaded.get("verb", verb) != verb:
        raise UsageError(f"{path} is a recipe of '{loaded['verb']}', not of '{verb}'")
    # A stage of a run names a model of the same run relative to itself.
    model, of_run = str(loaded.get("model")), (path.parent / "log.jsonl").is_file()
    if of_run and model.startswith("../") and (path.parent / model).is_dir():
        loaded["model"] = os.path.normpath(path.parent / model)
    return loaded


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values of a tree."""
    flat: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat += flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


def _parse_value(text: str) -> Any:
    try:
        return read_yaml(text)
    except (yaml.YAMLError, ValueError):
        return text


def _section(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def leaf_keys(model: type[BaseModel], prefix: str = "", *, mappings: bool = False) -> list[str]:
    """Every dotted key that a recipe of this model may hold; `mappings`: only those that hold a free mapping."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        if inner := _section(info.annotation):
            keys += leaf_keys(inner, f"{prefix}{name}.", mappings=mappings)
        elif not mappings or typing.get_origin(info.annotation) is dict:
            keys.append(f"{prefix}{name}")
    return keys


ELSEWHERE = {
    "learning_rate": "train.lr",
    "steps": "train.max_steps",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_clipping": "train.clip",
    "max_grad_norm": "train.clip",
    "adam_beta2": "train.beta2",
    "max_seq_length": "data.max_length",
}
"""Names of our keys in other tools, for did-you-mean."""


def _check_key(model: type[BaseModel], key: str, origin: str) -> None:
    allowed = leaf_keys(model)
    if key in allowed or any(key.startswith(f"{a}.") for a in leaf_keys(model, mappings=True)):
        return
    inside = [a for a in allowed if a.startswith(f"{key}.")]
    if inside:
        raise UsageError(
            f"'{key}' ({origin}) is a section: it must hold keys", f"keys: {', '.join(inside)}"
        )
    # Often only the section is missing: `lr` for `train.lr`.
    suffixes = ELSEWHERE | {a.rsplit(".", 1)[-1]: a for a in allowed}
    near = did_you_mean(key, allowed)
    if key.rsplit(".", 1)[-1] in suffixes:
        near = f"; did you mean '{suffixes[key.rsplit('.', 1)[-1]]}'?"
    hint = "" if near else f"; known keys: {', '.join(allowed)}"
    raise UsageError(f"unknown key '{shortened(key, 80)}' ({origin}){near}{hint}")


def _check_names(key: str, value: Any, origin: str) -> None:
    """Raise a UsageError for a key or text inside a value that no recipe can hold."""
    if any(not name or len(name) > MOST_KEY for name in key.split(".")):
        raise UsageError(f"'{key:.80}' ({origin}): a key is a word of 1 to {MOST_KEY} characters")
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (unprintable(text) or "\0" in text):
            raise UsageError(f"'{key}' ({origin}) is not UTF-8 text: {text!a:.80}")
    if isinstance(value, dict):
        for name, inside in value.items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"'{key}' ({origin}) holds the key {name!r}; keys are words")
            _check_names(f"{key}.{name}", inside, origin)


def explain(
    error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]
) -> list[str]:
    """One line for each wrong value, under the key that the user gave."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in error.errors():
        value, parts = values, []
        # A location also holds names of the types that pydantic tried; they are no keys.
        for part in one["loc"]:
            if (isinstance(value, dict) and part in value) or (
                isinstance(value, list) and isinstance(part, int)
            ):
                value = value[part]
                parts.append(str(part))
        key = ".".join(parts)
        given = (
            key
            if key in origins
            else next((k for k in origins if f"{key}.".startswith(f"{k}.")), None)
        )
        deeper = next((k for k in origins if k.startswith(f"{key}.")), key)
        origin = origins.get(given or deeper, "default")
        subject = f"'{key}'" if given else f"'{deeper}' lies under '{key}', which"
        message = str(one["msg"]).replace("Input should be", "must be")
        messages = found.setdefault(
            (subject, f"got {shortened(repr(one['input']), 500)} ({origin})"), []
        )
        messages.append(f"{message[0].lower()}{message[1:]}")
    lines = [
        f"{subject} {' or '.join([first, *(m.removeprefix('must be ') for m in others)])}, {got}"
        for (subject, got), (first, *others) in found.items()
    ]
    more = [f"... and {len(lines) - MOST_PROBLEMS:,} more"] if len(lines) > MOST_PROBLEMS else []
    return lines[:MOST_PROBLEMS] + more


def _lines(
    tree: Mapping[str, Any], origins: Mapping[str, str], prefix: str, depth: int
) -> list[str]:
    lines: list[str] = []
    for key, value in tree.items():
        dotted, shown = f"{prefix}{key}", one_line(key)
        if isinstance(value, dict) and value:
            lines.append(f"{'  ' * depth}{shown}:")
            lines += _lines(value, origins, f"{dotted}.", depth + 1)
            continue
        origin = origins.get(dotted, "default")
        # The name of a file may hold what would end a comment.
        lines.append(
            f"{'  ' * depth}{shown}: {one_line(value)}  # {origin if origin.isprintable() else ascii(origin)}"
        )
    return lines


def verb_of(recipe: str) -> str:
    """The kind of a recipe: of the shipped recipe with this name, else the file's `verb`, else distill."""
    verbs = recipe_models()
    for verb in verbs:
        if recipe in shipped(verb):
            return verb
    verb = read_recipe(recipe, None).get("verb", "distill") if Path(recipe).is_file() else "distill"
    if verb not in verbs:
        raise UsageError(
            f"{recipe} is a recipe of '{verb}'{did_you_mean(str(verb), verbs)}; known: {', '.join(verbs)}"
        )
    return str(verb)


def summary() -> list[dict[str, str]]:
    """Verb, name and first comment line of every shipped recipe."""
    return [
        {
            "verb": verb,
            "name": name,
            "about": path.read_text("utf-8").split("\n", 1)[0].removeprefix("#").strip(),
        }
        for verb in recipe_models()
        for name, path in shipped(verb).items()
    ]
