"""Resolve a recipe: merge YAML, `--set` and options into checked settings.

The precedence is option, `--set`, recipe, default. The origin of each value is kept. The error for
an unknown key names the nearest known key.
"""

import copy
import difflib
import functools
import importlib
import itertools
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kdcli.disk import LOG_FILE, RECIPE_FILE, REPORT_FILE, holds_run, near_path, unprintable
from kdcli.errors import UsageError, closest, did_you_mean, in_words, key_of, reason, shortened
from kdcli.messages import log_fact
from kdcli.recipe.options import settings_of
from kdcli.recipe.sections import RecipeValues, Section
from kdcli.recipe.yaml import MAX_RECIPE, flow_style, read_yaml

RecipeT = TypeVar("RecipeT", bound=Section)
RecipeT_co = TypeVar("RecipeT_co", bound=Section, covariant=True)

MAX_PROBLEMS = 20
"""Maximum number of lines of an error."""
ALIKE = 0.8
"""Least share of equal letters for which a key without its section is suggested with one."""
MAX_KEY = 128
"""Maximum number of characters of a key. PyYAML writes longer keys in another form."""

OF_RUNS = (LOG_FILE, REPORT_FILE)
"""Files next to the recipe of a run; a published run has no log."""
NULLS = ("", "~", "null")
"""The usual spellings of a value that is not set."""
SET, OPTION = "--set", "option"
COMMAND_LINE = (SET, OPTION)
"""Origins of values that the command line gives."""
SECTION = "section "
"""The prefix of an origin that is a section of another recipe, such as `section plan.distill`."""
TRAINING_RUN = "the training run of"
"""The beginning of the origin of values from the run that trained a model."""
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
"""The names of recipe keys in other tools, and their names here."""
RENAMED_VERBS = {
    "distill-task": ("distill",),
    "rerank": ("distill", "finetune"),
    "cotrain-task": ("cotrain",),
}
"""A recipe's `verb` before version 0.3 -> the verbs that accept it."""
RENAMED_KEYS = {
    "embedding": "workload",
    "generation": "workload",
    "ranking": "workload",
    "student.source": "model",
}
"""A recipe's keys and sections before version 0.3 -> their names in recipes without them."""


@dataclass(frozen=True)
class Resolved(Generic[RecipeT_co]):
    """A validated recipe, and the origin of each dotted key that was set.

    Keys that were not set have no origin. They have their defaults.
    """

    recipe: RecipeT_co
    origins: Mapping[str, str] = field(default_factory=dict)

    def to_yaml(self) -> str:
        """Return the whole recipe as YAML for `--recipe`. Comments give the origins."""
        return "\n".join(_lines(self.recipe.model_dump(), self.origins, "", 0)) + "\n"


def resolve(
    model: type[RecipeT],
    *,
    recipe: str | None,
    beneath: Mapping[str, Mapping[str, object]] | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    above: Mapping[str, Mapping[str, object]] | None = None,
) -> Resolved[RecipeT]:
    """Merge a recipe, `--set` pairs and options over the defaults of a settings model.

    Args:
        model: The settings model of the recipe.
        recipe: The name of a shipped recipe, a YAML file, or None.
        beneath: Values that `recipe` overrides: dotted key -> value, by origin. Later origins
            override earlier ones. Epochs also override an earlier origin's number of steps.
        sets: `key.path=value` pairs. Each value is YAML.
        options: Dotted key -> value. A value of None was not given.
        above: Values that override the options, by origin. Errors name the keys of an origin such
            as `section plan.distill` in full.

    Raises:
        UsageError: The recipe or a key is unknown, a value has the wrong type, or the YAML is
            malformed. The error has one line for each unknown key of the recipe, or for each wrong
            value.
    """
    verb = model.model_fields["verb"].default
    values: RecipeValues = {}
    origins: dict[str, str] = {}

    def put(key: str, value: object, origin: str) -> None:
        if value == {} and key and _names_in(key, leaf_keys(model)):
            return
        key = _current_key(model, key)
        _check_key(model, key, origin)
        _check_names(key, value, origin)
        target = values
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise UsageError(
                    f"{_named(key, origin)} lies under '{parent}', which was given the value "
                    f"{target!r}"
                )
        target[last] = value
        origins[key] = origin
        steps = ".".join([*parents, "max_steps"])
        of_recipe = origins.get(steps, origin) not in (origin, *COMMAND_LINE)
        if last == "epochs" and value is not None and of_recipe:
            # Otherwise the steps of a recipe below would override the epochs.
            target["max_steps"], origins[steps] = None, origin

    layers: dict[str, Mapping[str, object]] = dict(beneath or {})
    if recipe is not None:
        layers[f"recipe {recipe}"] = recipe_keys(recipe, verb)
    for origin, layer in layers.items():
        problems = []
        for key, value in _without_gone(model, origin, layer).items():
            try:
                put(key, value, origin)
            except UsageError as problem:
                problems.append(problem)
        _raise_all(problems)
    for pair in sets:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--set takes KEY.PATH=VALUE, got '{pair}'")
        key = _current_key(model, key.strip())
        put(key, _set_value(model, key, text), SET)
    for key, value in (options or {}).items():
        if value is not None:
            put(key, value, OPTION)
    for origin, keys in (above or {}).items():
        for key, value in flatten(keys):
            put(key, value, origin)
    resolved = Resolved(_validated(model, values, origins), origins)
    for origin, defaults in resolved.recipe.own_defaults().items():
        resolved = defaulted(resolved, defaults, origin)
    return resolved


def _without_gone(
    model: type[BaseModel], origin: str, keys: Mapping[str, object]
) -> Mapping[str, object]:
    """Drop the keys without a value that an earlier version wrote into the recipe of a run."""
    recipe = origin.removeprefix("recipe ")
    path = Path(recipe)
    if path.name != RECIPE_FILE or not any((path.parent / n).is_file() for n in OF_RUNS):
        return keys
    current = {key: _current_key(model, key) for key, value in keys.items() if value is None}
    gone = [old for old, key in current.items() if not _has_key(model, key)]
    if gone:
        log_fact(f"{recipe}: ignored {', '.join(gone)}: no longer a key, and null in this recipe")
    return {key: value for key, value in keys.items() if key not in gone}


def _current_key(model: type[BaseModel], key: str) -> str:
    """Return the present name of a key that was renamed, unless the model has the key itself."""
    for old, new in RENAMED_KEYS.items():
        is_old = key == old or key.startswith(f"{old}.")
        if is_old and new in model.model_fields and not _has_key(model, old):
            return f"{new}{key.removeprefix(old)}"
    return key


def _validated(
    model: type[RecipeT], values: Mapping[str, object], origins: Mapping[str, str]
) -> RecipeT:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(explain(error, values, origins))) from None


def defaulted(
    resolved: Resolved[RecipeT], values: Mapping[str, object], origin: str
) -> Resolved[RecipeT]:
    """Return the recipe with other defaults, such as a method's, for keys that were not set.

    Args:
        resolved: The recipe.
        values: Dotted key -> default.
        origin: The origin of these defaults.
    """
    changes = {key: value for key, value in values.items() if key not in resolved.origins}
    recipe = type(resolved.recipe).model_validate(_with(resolved.recipe.model_dump(), changes))
    return Resolved(recipe, {**resolved.origins, **dict.fromkeys(changes, origin)})


def inherited(resolved: Resolved[RecipeT]) -> list[str]:
    """Return a line for the log with the values that come from a model's training run."""
    values, by_origin = resolved.recipe.model_dump(), dict[str, list[str]]()
    for key, origin in resolved.origins.items():
        if origin.startswith(TRAINING_RUN):
            value = functools.reduce(lambda tree, name: tree[name], key.split("."), values)
            pairs = flatten({key: value})
            by_origin.setdefault(origin, []).extend(f"{name}={each}" for name, each in pairs)
    return [f"settings from {origin}: {', '.join(lines)}" for origin, lines in by_origin.items()]


def _with(tree: RecipeValues, values: Mapping[str, object]) -> RecipeValues:
    """Return a copy of a recipe's values in which some dotted keys are set."""
    changed = copy.deepcopy(tree)
    for key, value in values.items():
        *parents, last = key.split(".")
        target = changed
        for parent in parents:
            target = target[parent]
        target[last] = value
    return changed


def grid_options(model: type[Section], pairs: Sequence[str]) -> dict[str, list[object]]:
    """Parse `--grid KEY=V1,V2` into recipe keys below `grid`. `lr` is short for `train.lr`.

    Raises:
        UsageError: A pair has another form, or its key is unknown or given twice.
    """
    options: dict[str, list[object]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not text:
            raise UsageError(
                f"--grid takes KEY=VALUE,VALUE..., got '{pair}'",
                "for example --grid lr=2e-5,3e-5,5e-5",
            )
        key = key.strip().replace("-", "_")
        if f"train.{key}" in leaf_keys(model):
            key = f"train.{key}"
        _check_key(model, key, "--grid")
        if f"grid.{key}" in options:
            raise UsageError(f"--grid {key} is given twice", "list all its values in one option")
        options[f"grid.{key}"] = [_parse_value(value) for value in text.split(",")]
    return options


FRACTIONS = (
    *("accuracy", "agreement", "f1", "macro_f1", "micro_f1", "matthews", "precision", "recall"),
    *("pearson", "spearman", "exact", "best_exact", "best_f1", "answer_f1", "no_answer_accuracy"),
    *("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu"),
    *("mrr@10", "ndcg@10", "recall@10", "recall@100", "neighbours@10"),
)
"""kdcli's metrics whose best value is 1."""


def metric_limits(pairs: Sequence[str]) -> dict[str, float]:
    """Parse `--min-metric METRIC=VALUE` pairs. `99%` is 0.99.

    Raises:
        UsageError: A pair has another form.
    """
    limits = {}
    for pair in pairs:
        metric, _, text = pair.partition("=")
        metric, is_percent = metric.strip(), text.rstrip().endswith("%")
        value = _parse_value(text.rstrip().removesuffix("%"))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not metric or not is_number or not math.isfinite(value):
            raise UsageError(
                f"--min-metric takes METRIC=VALUE, got '{pair}'",
                "for example --min-metric accuracy=0.9",
            )
        value = value / 100 if is_percent else value
        if metric in FRACTIONS and value > 1:
            raise UsageError(
                f"--min-metric {pair}: {metric} is at most 1",
                f"points are hundredths: --min-metric {metric}={value / 100:g}",
            )
        if metric in limits:
            raise UsageError(f"--min-metric {metric} is given twice", "give each metric one value")
        limits[metric] = float(value)
    return limits


def combinations(
    resolved: Resolved[RecipeT],
) -> list[tuple[RecipeValues, Resolved[RecipeT]]]:
    """Return every combination of the values in `grid`, each with the recipe that has them set.

    These recipes have no grid and a single seed.

    Raises:
        UsageError: A key is unknown, a key has no list of values, or a value has the wrong type.
    """
    values = resolved.recipe.model_dump()
    lists = dict(flatten(values.pop("grid")))
    if values["train"]["max_steps"] and "train.epochs" in lists:
        raise UsageError(
            "grid.train.epochs changes nothing together with train.max_steps",
            "remove one of them",
        )
    model = type(resolved.recipe)
    grid: dict[str, list[object]] = {}
    for key, choices in lists.items():
        _check_key(model, key, f"{SECTION}grid")
        if not isinstance(choices, list) or not choices:
            raise UsageError(f"grid.{key} must hold a list of values, got {choices!r}")
        grid[key] = choices
    kept = {k: o for k, o in resolved.origins.items() if not k.startswith(("grid", "seeds"))}
    recipes = []
    for choice in itertools.product(*grid.values()):
        settings = dict(zip(grid, choice, strict=True))
        changed = _with(values | {"grid": {}, "seeds": 1}, settings)
        origins = kept | dict.fromkeys(settings, f"{SECTION}grid")
        recipes.append((settings, Resolved(_validated(model, changed, origins), origins)))
    return recipes


def shipped(verb: str) -> dict[str, Path]:
    """Return the files of the shipped recipes of a verb, by name."""
    folder = _recipes_folder() / verb
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def ablations(name: str) -> dict[str, dict[str, object]]:
    """Read a list of variants. Returns the dotted keys that each variant overrides, by its name.

    The first variant is the recipe itself.

    Args:
        name: A shipped list (`recipes/ablations/NAME.yaml`), or the path of a YAML file.

    Raises:
        UsageError: There is no such list, or it is not a mapping of mappings.
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


def variant_origin(listed: str, variant: str) -> str:
    """Return the origin of the keys of a variant in a list."""
    return f"variant {variant} of {listed}"


def recipe_names() -> list[str]:
    """Return the names of all shipped recipes without importing a settings model."""
    files = _recipes_folder().glob("*/*.yaml")
    return sorted({path.stem for path in files if path.parent.name != "ablations"})


def _recipes_folder() -> Path:
    """Return `recipes/`: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parents[1]
    shipped_inside = package / "recipes"
    return shipped_inside if shipped_inside.is_dir() else package.parent / "recipes"


def recipe_models() -> dict[str, type[Section]]:
    """Return the recipe's settings model of each verb, from kdcli/verbs/*/settings.py."""
    models: dict[str, type[Section]] = {}
    for path in sorted((Path(__file__).parents[1] / "verbs").glob("*/settings.py")):
        module = importlib.import_module(f"kdcli.verbs.{path.parent.name}.settings")
        models |= getattr(module, "RECIPES", {})
    return models


def read_recipe(recipe: str, verb: str | None) -> RecipeValues:
    """Read a recipe file without checking its keys.

    Args:
        recipe: The name of a shipped recipe of the verb, or a path.
        verb: The verb. None accepts only a path.

    Raises:
        UsageError: The recipe does not exist, or it is not a mapping of keys.
    """
    names = shipped(verb) if verb else {}
    path = names.get(recipe, Path(recipe))
    if not path.is_file():
        raise UsageError(
            f"no recipe '{recipe}' for {verb}{near_path(recipe, names)}",
            f"shipped recipes: {', '.join(names)}; or give the path of a YAML file",
        )
    try:
        if (size := path.stat().st_size) > MAX_RECIPE:
            raise ValueError(f"{size:,} bytes; at most {MAX_RECIPE:,} are read")
        loaded: Any = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} must hold a mapping of keys, got {type(loaded).__name__}")
    own_verb = loaded.get("verb", verb)
    if verb and verb not in (own_verb, *RENAMED_VERBS.get(str(own_verb), ())):
        raise UsageError(f"{path} is a recipe of '{own_verb}', not of '{verb}'")
    if own_verb == "rerank":
        loaded.setdefault("task", "rerank")
    if (path.parent / LOG_FILE).is_file() and any(map(holds_run, path.absolute().parents[1:])):
        _place_files_of_run(loaded, path.parent)
    if own_verb == "rerank" and verb == "finetune":
        return _without_teacher(loaded)
    return loaded


def _place_files_of_run(loaded: dict[str, object], folder: Path) -> None:
    """Replace paths that a part of a run gives relative to its own directory."""
    for key, value in loaded.items():
        if isinstance(value, dict):
            _place_files_of_run(value, folder)
        elif isinstance(value, str) and value.startswith("../") and (folder / value).exists():
            loaded[key] = os.path.normpath(folder / value)


def _without_teacher(reranker: RecipeValues) -> RecipeValues:
    """Return the recipe of a reranker without the keys that only distillation reads."""
    kept = {key: value for key, value in reranker.items() if key not in ("teacher", "cache_gb")}
    student = kept.get("student")
    if isinstance(student, dict):
        kept["student"] = {k: v for k, v in student.items() if k not in ("backend", "chosen")}
    return kept


def recipe_keys(recipe: str, verb: str) -> RecipeValues:
    """Read a verb's recipe without checking its keys: dotted key -> value; see `read_recipe`."""
    return {key: value for key, value in flatten(read_recipe(recipe, verb)) if key != "verb"}


def flatten(tree: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Return the dotted keys and the values of nested mappings."""
    flat: list[tuple[str, object]] = []
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


def _set_value(model: type[BaseModel], key: str, text: str) -> Any:
    """Read a value of `--set`: YAML, or for a key that holds text the text itself.

    The column `0` of a table is a name and no number, and ` #` in a name begins no comment.
    """
    value, text = _parse_value(text), text.strip()
    allowed = _types_at(model, key)
    takes_list = any(typing.get_origin(each) is list for each in allowed)
    is_yaml = (
        str not in allowed
        or text.startswith(("'", '"'))
        or (takes_list and isinstance(value, list))
        or (type(None) in allowed and text in NULLS)
    )
    return value if is_yaml else text


def _types_at(model: type[BaseModel], key: str) -> tuple[Any, ...]:
    """Return the types that a value may have, also of a key in a free mapping."""
    for setting in settings_of(model):
        allowed = _alternatives(setting.kind)
        if setting.key == key:
            return allowed
        if key.startswith(f"{setting.key}."):
            mapping = next((each for each in allowed if typing.get_origin(each) is dict), None)
            return _alternatives(typing.get_args(mapping)[1]) if mapping else ()
    return ()


def _alternatives(annotation: object) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def leaf_keys(model: type[BaseModel]) -> list[str]:
    """Return every dotted key that a recipe of this model may hold."""
    return [setting.key for setting in settings_of(model)]


def set_among(resolved: Resolved[Section], keys: Sequence[str]) -> str | None:
    """Return the name of the first of some keys that the user changed, for an error.

    Args:
        resolved: The recipe.
        keys: Dotted keys, and sections such as `data.mask`.

    Returns:
        The flag of an option, or the key with its origin; None if no key was changed.
    """
    settings = settings_of(type(resolved.recipe))
    defaults = {setting.key: setting.default for setting in settings}
    flags = {option.key_of(one.key): option.flag for one in settings for option in one.options}
    given = dict(flatten(resolved.recipe.model_dump()))
    # An option is the clearest sign of what the user wants.
    by_origin = sorted(resolved.origins.items(), key=lambda item: item[1] != OPTION)
    for key, origin in by_origin:
        if not any(key == each or key.startswith(f"{each}.") for each in keys):
            continue
        if key in defaults and given.get(key) == defaults[key]:
            continue
        return flags.get(key, key) if origin == OPTION else _named(key, origin)
    return None


def _has_key(model: type[BaseModel], key: str) -> bool:
    """Return whether a recipe may set a key, or has a section of this name."""
    return bool(_types_at(model, key) or _names_in(key, leaf_keys(model)))


def _check_key(model: type[BaseModel], key: str, origin: str) -> None:
    if _types_at(model, key):
        return
    allowed = leaf_keys(model)
    # Of a key in a list, only the part after the list.
    prefix = _in_full("", origin).rpartition("].")[2]
    if inside := _names_in(key, allowed):
        raise UsageError(
            f"{_named(key, origin)} is a section: it must hold keys", f"keys: {', '.join(inside)}"
        )
    # Often only the section is missing, as in `lr` for `train.lr`.
    suffixes = ELSEWHERE | {a.rsplit(".", 1)[-1]: a for a in allowed}
    suffix = key.rsplit(".", 1)[-1]
    near = did_you_mean(key, [a for a in allowed if _parts_are_alike(key, a)], prefix)
    if suffix in suffixes:
        near = f"; did you mean '{prefix}{suffixes[suffix]}'?"
    section = key
    while section and not _names_in(section, allowed):
        section = section.rpartition(".")[0]
    below = f"{section}." if section else ""
    names = _names_in(section, allowed)
    if not near:
        # The first part of the key that no section has.
        wrong = key.removeprefix(below).split(".")[0]
        near = did_you_mean(wrong, names, prefix + below)
    if not near and suffix == key and (like := closest(key, suffixes, ALIKE)):
        near = f"; did you mean '{prefix}{suffixes[like]}'?"
    known = f"; keys of '{prefix}{section}'" if section else "; known keys and sections"
    hint = "" if near else f"{known}: {', '.join(names)}"
    raise UsageError(f"unknown key {_named(shortened(key, 80), origin)}{near}{hint}")


def _names_in(section: str, allowed: Iterable[str]) -> list[str]:
    """List the keys and sections in a section; `section` is empty for the top of a recipe."""
    below = f"{section}." if section else ""
    inside = (key.removeprefix(below) for key in allowed if key.startswith(below))
    return list(dict.fromkeys(key.split(".")[0] for key in inside))


def _in_full(key: str, origin: str) -> str:
    """Return a key as the user wrote it: after the section of another recipe that holds it."""
    section = origin.removeprefix(SECTION)
    return key if section == origin else f"{section}.{key}"


def _named(key: str, origin: str) -> str:
    """Name a key with its origin: `'lr' (--set)`, or `'plan.distill.lr'` of a section."""
    # A key that the user wrote may hold brackets.
    full = _in_full(key, origin)
    return f"'{key}' ({origin})" if full == key else in_words(full)


def _parts_are_alike(key: str, other: str) -> bool:
    """Whether two keys may be the same one, misspelt.

    Sharing a section, as `data.share` and `data.stride` do, does not count.
    """
    pairs = zip(key.split("."), other.split("."), strict=False)
    return all(difflib.get_close_matches(a, [b]) for a, b in pairs)


def _check_names(key: str, value: object, origin: str) -> None:
    """Raise a UsageError for a key or a text that a recipe cannot hold."""
    if any(not name or len(name) > MAX_KEY for name in key.split(".")):
        raise UsageError(
            f"{_named(key[:80], origin)}: a key is a word of 1 to {MAX_KEY} characters"
        )
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (unprintable(text) or "\0" in text):
            raise UsageError(f"{_named(key, origin)} is not UTF-8 text: {text!a:.80}")
    if isinstance(value, dict):
        for name, inside in value.items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"{_named(key, origin)} holds the key {name!r}; keys are words")
            _check_names(f"{key}.{name}", inside, origin)


def suggestion(problem: ErrorDetails) -> str:
    """Return `"; did you mean 0.9?"` if a share below 1 was given as 90, the nearest word, or how a
    list of one text is written.

    The result may be empty. A number below 2 is more likely a share above 1 than a percentage.
    """
    limits, value = problem.get("ctx", {}), problem["input"]
    if problem["type"] == "literal_error":
        return did_you_mean(str(value), re.findall(r"'(.*?)'", limits["expected"]))
    if problem["type"] == "list_type" and isinstance(value, str):
        return f"; a list of one is [{value}]"
    is_share = 1 in (limits.get("lt"), limits.get("le"))
    if not is_share or not isinstance(value, int | float) or not 2 <= value < 100:
        return ""
    return f"; did you mean {value / 100:g}?"


def explain(
    error: ValidationError, values: Mapping[str, object], origins: Mapping[str, str]
) -> list[str]:
    """Return one line for each wrong value, with the key that the user gave."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for problem in error.errors():
        key = key_of(problem["loc"], values)
        name = key.partition("[")[0]
        enclosing = (k for k in origins if f"{name}.".startswith(f"{k}."))
        set_key = name if name in origins else next(enclosing, None)
        deeper = next((k for k in origins if k.startswith(f"{key}.")), key)
        origin = origins.get(set_key or deeper, "default")
        subject = in_words(_in_full(key, origin))
        if not set_key:
            subject = f"{in_words(_in_full(deeper, origin))} lies under {subject}, which"
        value = f"got {shortened(repr(problem['input']), 500)}"
        # A section is a part of its keys' names.
        note = "" if origin.startswith(SECTION) else f" ({origin})"
        value += f"{note}{suggestion(problem)}"
        reasons.setdefault((subject, value), []).append(reason(problem))
    lines = []
    for (subject, value), (first, *others) in reasons.items():
        alternatives = [first, *(other.removeprefix("must be ") for other in others)]
        lines.append(f"{subject} {' or '.join(dict.fromkeys(alternatives))}, {value}")
    return _first(lines)


def _first(lines: list[str]) -> list[str]:
    """Return the first lines of an error, and the number of the others."""
    omitted = len(lines) - MAX_PROBLEMS
    return lines[:MAX_PROBLEMS] + ([f"... and {omitted:,} more"] if omitted > 0 else [])


def _raise_all(problems: Sequence[UsageError]) -> None:
    """Raise one error for several, with a line and the hint of each.

    Raises:
        UsageError: There is a problem.
    """
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = ["; ".join(filter(None, [each.message, each.hint])) for each in problems]
        raise UsageError("\n".join(_first(lines)))


def _lines(
    tree: Mapping[str, object], origins: Mapping[str, str], prefix: str, depth: int
) -> list[str]:
    """Return the YAML lines of nested mappings, each value with its origin as a comment."""
    lines: list[str] = []
    for key, value in tree.items():
        dotted, name, indent = f"{prefix}{key}", flow_style(key), "  " * depth
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{name}:")
            lines += _lines(value, origins, f"{dotted}.", depth + 1)
            continue
        origin = origins.get(dotted, "default")
        # A file name may hold characters that would end a comment.
        comment = origin if origin.isprintable() else ascii(origin)
        lines.append(f"{indent}{name}: {flow_style(value)}  # {comment}")
    return lines


def verb_of(recipe: str) -> str:
    """Return the verb of a recipe.

    A shipped recipe's verb is the name of its folder. A file names its `verb`, by default distill.

    Raises:
        UsageError: The file names an unknown verb.
    """
    verbs = recipe_models()
    for verb in verbs:
        if recipe in shipped(verb):
            return verb
    verb = read_recipe(recipe, None).get("verb", "distill") if Path(recipe).is_file() else "distill"
    verb, *_ = RENAMED_VERBS.get(str(verb), (verb,))
    if verb not in verbs:
        raise UsageError(
            f"{recipe} is a recipe of '{verb}'{did_you_mean(str(verb), verbs)}; "
            f"known: {', '.join(verbs)}"
        )
    return str(verb)


def shipped_recipes() -> list[dict[str, str]]:
    """Return the verb, the name and the first comment line of every shipped recipe."""
    rows = []
    for verb in recipe_models():
        for name, path in shipped(verb).items():
            first, _, _ = path.read_text("utf-8").partition("\n")
            rows.append({"verb": verb, "name": name, "about": first.removeprefix("#").strip()})
    return rows
