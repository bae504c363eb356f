"""The verbs as Python functions: their arguments are the options, their result is the report."""

import functools
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdcli.cli.verb import Verb
from kdcli.errors import UsageError

if TYPE_CHECKING:
    from kdcli.cli.parameters import Parameter

PATHS = re.compile(r"\b(MODEL|TEACHER|STUDENT|SOURCE|DIR|FILE)\b")
"""Placeholders of text that may be a path, so that Python also takes a `Path`."""


MODELS = ("model", "models", "teacher", "student")
"""The arguments that name models."""
VALUES = (str, Number, Path, type(None))
"""The types of an argument, or of the items of a list."""
HINTS = (
    (
        "save_pretrained",
        "save it and its tokenizer with .save_pretrained(DIR), and give the directory",
    ),
    ("to_csv", 'write it with .to_csv("train.csv", index=False), and give the path of the file'),
    ("write_csv", 'write it with .write_csv("train.csv"), and give the path of the file'),
    ("save_to_disk", "write each split with .to_json(FILE.jsonl), and give the directory"),
    ("keys", "write its rows to a .jsonl file, one JSON object a line, and give the path"),
)
"""A method that identifies a kind of object, and how such an object becomes a file."""


def command(name: str) -> Verb:
    """Return a verb of the command line."""
    return getattr(importlib.import_module(f"kdcli.verbs.{name}.cli"), name)  # type: ignore[no-any-return]


def annotation(parameter: "Parameter") -> Any:
    """Return the type of an argument. A single value may stand for a list, and text for a path."""
    kind: Any = typing.get_args(parameter.kind)[0] if parameter.is_list else parameter.kind
    if kind is Path or (kind is str and PATHS.search(parameter.option.metavar or "")):
        kind = Path | str
    if parameter.is_list:
        kind = kind | Sequence[kind]
    return kind if parameter.is_required or parameter.default is not None else kind | None


@functools.cache
def signature(name: str) -> inspect.Signature:
    """Return the signature of a verb: its arguments by position, its options by keyword."""
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if each.option.is_argument
            else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.is_required else each.default,
            annotation=annotation(each),
        )
        for each in command(name).parameters
        if not each.option.terminal
    ]
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
        values = {each.name: each.default for each in verb.parameters} | {"json": None}
        if "processes" in values:
            values["processes"] = 1
        for argument, value in arguments.items():
            _check_value(name, argument, value)
        for each in verb.parameters:
            if arguments.get(each.name) is not None:
                values[each.name] = _converted(arguments[each.name], each.kind)
        from accelerate.state import AcceleratorState, GradientState

        # A process may call several verbs, each on a device and in a precision of its own.
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return verb.run(values)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "kdcli"
    call.__doc__ = (
        f"{verb.description}\n\n"
        f"It takes the options of `kdcli {name}`. Raises kdcli.errors.KdcliError."
    )
    call.__signature__ = signature(name)  # type: ignore[attr-defined]
    return call


def _check_value(verb: str, name: str, value: Any) -> None:
    """Raise a UsageError for an object, with a hint how to write it to a file."""
    values = value if isinstance(value, list | tuple) else [value]
    wrong = next((each for each in values if not isinstance(each, VALUES)), None)
    if wrong is None:
        return
    kind, is_model = type(wrong).__name__, hasattr(wrong, "save_pretrained")
    hint = next((hint for part, hint in HINTS if hasattr(wrong, part)), None)
    if name in ("data", "source"):
        allowed = "a file, a directory, a hub id or a URL"
        hint = "give the data here, and the model as an argument of its own" if is_model else hint
    elif is_model or name in MODELS:
        allowed = "a directory or a hub id"
        hint = hint if is_model else "save the model and its tokenizer, and give the directory"
    else:
        allowed = "a string, a number, True, False, a path, or a list of these"
    message = f"kdcli.{verb}: {name} takes {allowed}, not an object of type {kind}"
    raise UsageError(message, hint)


def _converted(value: Any, kind: Any) -> Any:
    """Return an argument as the command line has it: paths, and lists also of a single value."""
    if typing.get_origin(kind) is list:
        values = [value] if isinstance(value, str | Path) else value
        values = values if isinstance(values, Sequence) else [values]
        return [_converted(each, typing.get_args(kind)[0]) for each in values]
    if kind is Path and isinstance(value, str):
        return Path(value)
    return str(value) if isinstance(value, Path) and kind is not Path else value
