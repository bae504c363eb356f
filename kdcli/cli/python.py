"""The verbs as Python functions: their arguments are the options, their result is the report.

Where the command line takes `--data SOURCE`, a function also takes an object such as a DataFrame,
and `config` takes the keys of `--set` as nested dicts.
"""

import dataclasses
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdcli.cli.libraries import prepare_libraries
from kdcli.cli.verb import Verb
from kdcli.errors import UsageError

if TYPE_CHECKING:
    from kdcli.cli.parameters import Parameter

PATHS = re.compile(r"\b(MODEL|TEACHER|STUDENT|SOURCE|DIR|FILE)\b")
"""Placeholders of text that may be a path, so that Python also takes a `Path`."""


VALUES = (str, Number, Path, type(None))
"""The types of an argument, or of the items of a list."""
SOURCE = "SOURCE"
"""The placeholder of an option that takes data."""
MODELS = ("MODEL", "TEACHER", "STUDENT")
"""The placeholders of options that take a model."""
SOURCES = ("data.source", "data.train", "eval.source", "general.source", "text")
"""The recipe keys that hold a source of data."""
SAVE = "save it and its tokenizer with .save_pretrained(DIR), and give the directory"


def command(name: str) -> Verb:
    """Return a verb of the command line."""
    return getattr(importlib.import_module(f"kdcli.verbs.{name}.cli"), name)  # type: ignore[no-any-return]


def annotation(parameter: "Parameter") -> Any:
    """Return the type of an argument. A single value may stand for a list, and text for a path."""
    if parameter.option.metavar == SOURCE:
        # An alias, so that nothing imports pandas; the stub imports it.
        return "Data" if parameter.is_required else "Data | None"
    kind: Any = typing.get_args(parameter.kind)[0] if parameter.is_list else parameter.kind
    if kind is Path or (kind is str and PATHS.search(parameter.option.metavar or "")):
        kind = Path | str
    if parameter.is_list:
        kind = kind | Sequence[kind]
    return kind if parameter.is_required or parameter.default is not None else kind | None


CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Mapping[str, Any] | None,
)
"""Recipe keys as nested dicts, which only the functions take."""


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
            parameters.append(CONFIG)
    return inspect.Signature(parameters)


def function(name: str) -> Callable[..., Any]:
    """Return a verb as a function."""
    verb = command(name)

    def call(*positional: Any, **options: Any) -> Any:
        try:
            arguments = signature(name).bind(*positional, **options).arguments
        except TypeError as error:
            hint = f"help(kdcli.{name}) lists the arguments"
            raise UsageError(f"kdcli.{name}: {error}", hint) from None
        # Before anything imports torch.
        prepare_libraries(quiet=False, verbose=False)
        values = {each.name: each.default for each in verb.parameters} | {"json": None}
        if "processes" in values:
            values["processes"] = 1
        config = arguments.pop("config", None)
        for each in verb.parameters:
            if (value := arguments.get(each.name)) is None:
                continue
            subject = f"kdcli.{name}: {each.name}"
            if each.option.metavar == SOURCE:
                value = source_of(value, subject)
            is_model = each.option.metavar in MODELS
            check_value(value, subject, is_model=is_model)
            values[each.name] = _converted(value, each.kind)
        if config is not None:
            # A single assignment overrides the same key of `config`.
            values["sets"] = [*assignments(config, f"kdcli.{name}"), *(values["sets"] or [])]
        from accelerate.state import AcceleratorState, GradientState

        # A process may call several verbs, each on a device and in a precision of its own.
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        result = verb.run(values)
        from kdcli.deploy.usable import Usable

        if values.get("trust_remote_code") and isinstance(result, Usable):
            return dataclasses.replace(result, trust_remote_code=True)  # type: ignore[type-var]
        return result

    call.__name__ = call.__qualname__ = name
    call.__module__ = "kdcli"
    call.__doc__ = (
        f"{verb.description}\n\n"
        f"It takes the options of `kdcli {name}`. Raises kdcli.errors.KdcliError."
    )
    call.__signature__ = signature(name)  # type: ignore[attr-defined]
    return call


def source_of(value: Any, subject: str) -> Any:
    """Return what `--data` takes: a path or an id, or the file to which an object is written.

    Raises:
        UsageError: the object cannot be written. The message begins with `subject`.
    """
    if isinstance(value, str | Path):
        return value
    from kdcli.data.objects import write_object
    from kdcli.engine.progress import Progress

    try:
        path = write_object(value, Progress.log)
    except UsageError as error:
        raise error.of(subject) from None
    Progress.log(f"{subject.split()[-1]} is in {path}")
    return path


def check_value(value: Any, subject: str, *, is_model: bool) -> None:
    """Check that an argument is what the command line could hold.

    Args:
        value: the argument.
        subject: the beginning of the message.
        is_model: whether the argument names a model.

    Raises:
        UsageError: the argument is an object or a dict.
    """
    values = value if isinstance(value, list | tuple) else [value]
    wrong = next((each for each in values if not isinstance(each, VALUES)), None)
    if wrong is None:
        return
    allowed, hint = (
        "a string, a number, True, False, a path, or a list of these",
        "convert it to one of these",
    )
    if is_model:
        allowed, hint = "a directory or a hub id", SAVE
    elif isinstance(wrong, Mapping):
        hint = "give recipe keys as nested dicts with config="
    kind = type(wrong).__name__
    raise UsageError(f"{subject} takes {allowed}, not an object of type {kind}", hint)


def assignments(config: Any, subject: str) -> list[str]:
    """Return the values of `--set` that say the same as nested dicts.

    Raises:
        UsageError: a key is no text, or a value cannot stand in a recipe.
    """
    from kdcli.recipe.yaml import one_line

    if not isinstance(config, Mapping):
        raise UsageError(
            f"{subject}: config takes a dict of recipe keys, not {type(config).__name__}",
            'for example config={"train": {"lr": 1e-3}}',
        )
    return [f"{key}={one_line(value)}" for key, value in _leaves(config, "", subject)]


def _leaves(tree: Mapping[Any, Any], prefix: str, subject: str) -> Iterator[tuple[str, Any]]:
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


def _plain(value: Any, key: str, subject: str) -> Any:
    """Return a value of a recipe key as YAML holds it.

    Raises:
        UsageError: the value is an object.
    """
    if isinstance(value, Number) and hasattr(value, "item"):
        # The numbers of numpy have types of their own.
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


def _converted(value: Any, kind: Any) -> Any:
    """Return an argument as the command line has it: paths, and lists also of a single value."""
    if typing.get_origin(kind) is list:
        values = [value] if isinstance(value, str | Path) else value
        values = values if isinstance(values, Sequence) else [values]
        return [_converted(each, typing.get_args(kind)[0]) for each in values]
    if kind is Path and isinstance(value, str):
        return Path(value)
    return str(value) if isinstance(value, Path) and kind is not Path else value
