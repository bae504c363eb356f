"""Provide the verbs as Python functions. Their arguments are the options of the command line.

A function returns the report. Where the command line takes `--data SOURCE` or a model, the function
also takes an object such as a DataFrame or a `SentenceTransformer`. `config` takes the keys of
`--set` as nested dicts.
"""

import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdcli.cli.libraries import prepare_libraries
from kdcli.cli.verb import Verb
from kdcli.errors import Interrupted, Stopped, UsageError

if TYPE_CHECKING:
    from kdcli.cli.parameters import Parameter
    from kdcli.report.finish import RunResult

PATH_METAVARS = re.compile(r"\b(MODEL|TEACHER|STUDENT|SOURCE|DIR|FILE)\b")
"""Placeholders of text that may be a path. Python also takes a `Path` for these."""

VALUES = (str, Number, Path, type(None))
"""The types of an argument, or of the items of a list."""
SOURCE = "SOURCE"
"""The placeholder of an option that takes data."""
MODELS = {"MODEL", "TEACHER", "STUDENT"}
"""The placeholders of options that take a model, perhaps next to others: `MODEL|FILE`."""
SOURCES = ("data.source", "data.train", "eval.source", "general.source", "text")
"""The recipe keys that hold a source of data."""
MAX_WIDTH = 94
"""The maximum width of a docstring, which the stub indents."""
SAVE = "save it and its tokenizer with .save_pretrained(DIR), and give the directory"


def command(name: str) -> Verb:
    """Return a verb of the command line."""
    module = importlib.import_module(f"kdcli.verbs.{name}.cli")
    return getattr(module, name)  # type: ignore[no-any-return]


def annotation(parameter: "Parameter") -> Any:
    """Return the type of an argument. It allows a single value for a list, and text for a path."""
    # These are aliases, so that importing kdcli does not import pandas. The stub imports them.
    if parameter.option.metavar == SOURCE:
        return "Data" if parameter.is_required else "Data | None"
    if takes_model(parameter):
        alias = "Model | Sequence[Model]" if parameter.is_list else "Model"
        return alias if parameter.is_required else f"{alias} | None"
    kind: Any = typing.get_args(parameter.kind)[0] if parameter.is_list else parameter.kind
    if kind is Path or (kind is str and PATH_METAVARS.search(parameter.option.metavar or "")):
        kind = Path | str
    if parameter.is_list:
        kind = kind | Sequence[kind]
    return kind if parameter.is_required or parameter.default is not None else kind | None


def takes_model(parameter: "Parameter") -> bool:
    """Whether an argument is a model."""
    return not MODELS.isdisjoint((parameter.option.metavar or "").split("|"))


ONLY_IN_PYTHON = {
    "config": (Mapping[str, Any] | None, "Recipe keys as nested dicts, with the values of --set."),
    "tokenizer": (
        "PreTrainedTokenizerBase | None",
        "Tokenizer of the models that are given as PreTrainedModel objects.",
    ),
}
"""Arguments that the command line does not have -> their types and descriptions."""


@functools.cache
def signature(name: str) -> inspect.Signature:
    """Return the signature of a verb: its arguments by position, its options by keyword."""
    parameters = []
    for each in command(name).parameters:
        if each.option.terminal:
            continue
        parameters.append(
            inspect.Parameter(
                each.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD
                if each.option.is_argument
                else inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.is_required else each.default,
                annotation=annotation(each),
            )
        )
        if each.name == "sets":
            parameters += [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
                )
                for name, (kind, _) in ONLY_IN_PYTHON.items()
            ]
    return inspect.Signature(parameters)


def values_of(verb: Verb, *positional: object, **options: object) -> dict[str, Any]:
    """Return the values of a verb's parameters for a call of its function.

    Raises:
        UsageError: An argument is unknown, or has a type that the command line cannot express.
    """
    try:
        arguments = signature(verb.name).bind(*positional, **options).arguments
    except TypeError as error:
        hint = f"help(kdcli.{verb.name}) lists the arguments"
        recipe_keys = {} if verb.recipe is None else verb.recipe.model_fields
        unknown = options.keys() - signature(verb.name).parameters.keys()
        sections = sorted(recipe_keys.keys() & {name.split("__")[0] for name in unknown})
        if sections:
            example = f"config={{'{sections[0]}': ...}}"
            hint = f"keys of the recipe are in config, as in {example}; {hint}"
        raise UsageError(f"kdcli.{verb.name}: {error}", hint) from None
    # This must run before anything imports torch.
    prepare_libraries(quiet=False, verbose=False, is_command=False)
    from kdcli.data.objects import needs_tokenizer
    from kdcli.recipe.defaults import option_defaults

    values: dict[str, Any] = {each.name: each.default for each in verb.parameters} | {"json": None}
    values |= {name: value for name, value in option_defaults().items() if name in values}
    if "processes" in values:
        values["processes"] = 1
    config, tokenizer = arguments.pop("config", None), arguments.pop("tokenizer", None)
    if tokenizer is not None and not any(map(needs_tokenizer, _flat(arguments.values()))):
        raise UsageError(
            f"kdcli.{verb.name}: tokenizer belongs to a PreTrainedModel, and none is given",
            "omit it: a directory, a hub id and sentence-transformers have their own",
        )
    for each in verb.parameters:
        if (value := arguments.get(each.name)) is None:
            continue
        subject = f"kdcli.{verb.name}: {each.name}"
        if each.option.metavar == SOURCE:
            value = source_of(value, subject)
        if is_model := takes_model(each):
            value = model_of(value, tokenizer, subject)
        check_value(value, subject, is_model=is_model)
        values[each.name] = _converted(value, each.kind)
    if config is not None:
        # A single assignment overrides the same key of `config`.
        values["sets"] = [*assignments(config, f"kdcli.{verb.name}"), *(values["sets"] or [])]
    return values


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """Return a verb as a function, always the same one, so that it can be pickled."""
    verb = command(name)

    def call(*positional: object, **options: object) -> Any:
        values = values_of(verb, *positional, **options)
        from kdcli.deploy.usable import Usable
        from kdcli.engine.session import own_state
        from kdcli.messages import facts_once

        try:
            with own_state(), facts_once():
                result = verb.run(values)
        except (Stopped, Interrupted) as error:
            # Programs that go on after an error must not go on after Ctrl-C.
            raise KeyboardInterrupt(". ".join(filter(None, [error.message, error.hint]))) from None

        if values.get("trust_remote_code") and isinstance(result, Usable):
            return dataclasses.replace(result, trust_remote_code=True)
        return result

    call.__name__ = call.__qualname__ = name
    call.__module__ = "kdcli"
    call.__doc__ = docstring(verb)
    call.__signature__ = signature(name)  # type: ignore[attr-defined]
    return call


def docstring(verb: Verb) -> str:
    """Return the docstring of a verb's function: its description and its arguments."""
    helps = {name: description for name, (_, description) in ONLY_IN_PYTHON.items()}
    for each in verb.parameters:
        takes_objects = each.option.metavar == SOURCE
        helps[each.name] = each.help + " Or an object, such as a DataFrame." * takes_objects
        helps[each.name] += " Or a model in memory." * takes_model(each)
    arguments = (
        textwrap.fill(
            f"{name}: {helps[name]}", MAX_WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8
        )
        for name in signature(verb.name).parameters
    )
    parts = [
        verb.description,
        f"The arguments are the options of `kdcli {verb.name}`. Raises kdcli.errors.KdcliError.",
        "\n".join(["Args:", *arguments]),
    ]
    return "\n\n".join(parts)


def read(folder: Path | str) -> "RunResult":
    """Return the result of a finished run, also of one whose result missed a limit.

    Raises kdcli.errors.UsageError: there is no run in `folder`, it is not finished, or its report
        is damaged or from another version of kdcli.
    """
    # This must run before anything imports torch.
    prepare_libraries(quiet=False, verbose=False, is_command=False)
    from kdcli.report.finish import RunResult

    return RunResult.read(Path(folder))


def source_of(value: object, subject: str) -> object:
    """Return a value for `--data`. An object is written to a file, whose path is returned.

    Raises:
        UsageError: The object cannot be written. The message begins with `subject`.
    """
    if isinstance(value, str | Path):
        return value
    from kdcli.data.objects import write_object
    from kdcli.messages import log

    try:
        path = write_object(value)
    except UsageError as error:
        raise error.of(subject) from None
    log(f"{subject.split()[-1]} is in {path}")
    return path


def model_of(value: object, tokenizer: object, subject: str) -> object:
    """Return a value for a model. Models in memory are saved, and replaced by their directories.

    Raises:
        UsageError: A model cannot be saved. The message begins with `subject`.
    """
    from kdcli.data.objects import is_model, write_model
    from kdcli.models.model import ROWS_FILE

    if isinstance(value, list | tuple):
        return [model_of(each, tokenizer, subject) for each in value]
    if not is_model(value):
        return value
    try:
        return str(write_model(value, tokenizer, beside=ROWS_FILE))
    except UsageError as error:
        raise error.of(subject) from None


def check_value(value: object, subject: str, *, is_model: bool) -> None:
    """Check that an argument has a type that the command line can express.

    Args:
        value: The argument.
        subject: The beginning of the message.
        is_model: Whether the argument names a model.

    Raises:
        UsageError: The argument is an object or a dict.
    """
    wrong = next((each for each in _flat([value]) if not isinstance(each, VALUES)), None)
    if wrong is None:
        return
    allowed, hint = (
        "a string, a number, True, False, a path, or a list of these",
        "convert it to one of these",
    )
    if is_model:
        allowed = (
            "a directory, a hub id, a PreTrainedModel, a SentenceTransformer or a CrossEncoder"
        )
        hint = SAVE
    elif isinstance(wrong, Mapping):
        hint = "give recipe keys as nested dicts with config="
    kind = type(wrong).__name__
    raise UsageError(f"{subject} takes {allowed}, not an object of type {kind}", hint)


def _flat(values: Iterable[object]) -> Iterator[object]:
    """Yield values, and in place of a list its items."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else [value]


def assignments(config: object, subject: str) -> list[str]:
    """Convert nested dicts to the equivalent values of `--set`.

    Raises:
        UsageError: A key is not text, or a recipe cannot hold a value.
    """

    from kdcli.recipe.yaml import flow_style

    if not isinstance(config, Mapping):
        raise UsageError(
            f"{subject}: config takes a dict of recipe keys, not {type(config).__name__}",
            'for example config={"train": {"lr": 1e-3}}',
        )
    return [f"{key}={flow_style(value)}" for key, value in _leaves(config, "", subject)]


def _leaves(
    tree: Mapping[object, object], prefix: str, subject: str
) -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and the plain values of nested dicts."""
    for name, value in tree.items():
        if not isinstance(name, str) or not name or "=" in name or name != name.strip():
            place = f"config: {prefix.rstrip('.')}" if prefix else "config"
            raise UsageError(
                f"{subject}: {place} has the key {name!r}; keys are words",
                'for example config={"train": {"lr": 1e-3}}',
            )
        key = f"{prefix}{name}"
        if key in SOURCES and not isinstance(value, VALUES):
            yield key, str(source_of(value, f"{subject}: {key}"))
        elif isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.", subject)
        else:
            yield key, _plain(value, key, subject)


def _plain(value: object, key: str, subject: str) -> object:
    """Convert the value of a recipe key to the plain types of YAML.

    Raises:
        UsageError: The value is an object.
    """
    if isinstance(value, Number) and hasattr(value, "item"):
        # NumPy's numbers are not int or float.
        value = value.item()
    if isinstance(value, int | float | type(None)):
        return value
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each, key, subject) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each, key, subject) for name, each in value.items()}
    raise UsageError(
        f"{subject}: config: '{key}' takes text, a number, True, False, None, or a list or dict "
        f"of these, not an object of type {type(value).__name__}",
        SAVE if hasattr(value, "save_pretrained") else "convert it to one of these",
    )


def _converted(value: object, kind: Any) -> object:
    """Convert an argument to its type on the command line: text to a path, a value to a list."""
    if typing.get_origin(kind) is list:
        values = [value] if isinstance(value, str | Path) else value
        values = values if isinstance(values, Sequence) else [values]
        return [_converted(each, typing.get_args(kind)[0]) for each in values]
    if kind is Path and isinstance(value, str):
        return Path(value)
    return str(value) if isinstance(value, Path) and kind is not Path else value
