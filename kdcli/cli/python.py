"""The verbs as functions of Python: the arguments are the options, the value is the report."""

import importlib
import inspect
from collections.abc import Callable
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from kdcli.errors import UsageError

# Options of a terminal alone: printing, more processes than this one, and what leaves no report.
TERMINAL = ("json", "quiet", "verbose", "processes", "dry_run", "portable", "augment_only")


def command(verb: str) -> Callable[..., Any]:
    """The function behind a verb of the command line."""
    return getattr(importlib.import_module(f"kdcli.verbs.{verb}.cli"), verb)  # type: ignore[no-any-return]


def signature(verb: str) -> inspect.Signature:
    """The signature of a verb from Python: its arguments by place, its options by keyword."""
    parameters = []
    for one in inspect.signature(command(verb)).parameters.values():
        kind, info = one.annotation, None
        if get_origin(kind) is Annotated:
            kind, info, *_ = get_args(kind)
        if one.name not in TERMINAL:
            by_place = type(info).__name__ == "ArgumentInfo"
            how = one.POSITIONAL_OR_KEYWORD if by_place else one.KEYWORD_ONLY
            if Path in (kind, *get_args(kind)):
                kind = Path | str if kind is Path else Path | str | None
            parameters.append(one.replace(annotation=kind, kind=how))
    # A required option follows arguments that have a default.
    return inspect.Signature(sorted(parameters, key=lambda one: one.kind))


def _converted(value: Any, kind: Any) -> Any:
    """An argument as the command line has it: paths, and lists of one value."""
    kinds = (kind, *get_args(kind))
    of_list = next((k for k in kinds if get_origin(k) is list), None)
    if of_list is not None and value is not None:
        items = list(value) if isinstance(value, list | tuple) else [value]
        return [_converted(item, get_args(of_list)[0]) for item in items]
    if Path in kinds and isinstance(value, str):
        return Path(value)
    return str(value) if isinstance(value, Path) and Path not in kinds else value


def _check_value(verb: str, name: str, value: Any) -> None:
    """Refuse an object where an option is expected, and say how to hand it over as a file."""
    values = value if isinstance(value, list | tuple) else [value]
    wrong = next((one for one in values if not isinstance(one, _VALUES)), None)
    if wrong is None:
        return
    kind = type(wrong).__name__
    if name in ("data", "source"):
        allowed = "a file, a directory, a hub id or a URL"
    elif hasattr(wrong, "save_pretrained"):
        allowed = "a directory or a hub id"
    else:
        allowed = "a string, a number, True, False, a path, or a list of these"
    message = f"kdcli.{verb}: {name} takes {allowed}, not an object of type {kind}"
    raise UsageError(message, next((hint for part, hint in _HINTS if hasattr(wrong, part)), None))


_VALUES = (str, Number, Path, type(None))
# A method that tells a kind of object, and how an object of this kind becomes a file.
_HINTS = (
    (
        "save_pretrained",
        "save it and its tokenizer with .save_pretrained(DIR), and give the directory",
    ),
    ("to_csv", 'write it with .to_csv("train.csv", index=False), and give the path of the file'),
    ("write_csv", 'write it with .write_csv("train.csv"), and give the path of the file'),
    ("save_to_disk", "write each split with .to_json(FILE.jsonl), and give the directory"),
    ("keys", "write its rows to a .jsonl file, one JSON object a line, and give the path"),
)


def function(verb: str) -> Callable[..., Any]:
    """A verb as a function."""
    run, known = command(verb), signature(verb)
    preset = {
        one.name: one.default
        for one in inspect.signature(run).parameters.values()
        if one.name in TERMINAL
    }
    preset |= {"json": None} | ({"processes": 1} if "processes" in preset else {})

    def call(*places: Any, **options: Any) -> Any:
        try:
            bound = known.bind(*places, **options)
        except TypeError as error:
            raise UsageError(
                f"kdcli.{verb}: {error}", f"help(kdcli.{verb}) lists the arguments"
            ) from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            _check_value(verb, name, value)
        given = {
            name: _converted(value, known.parameters[name].annotation)
            for name, value in bound.arguments.items()
        }
        from accelerate.state import AcceleratorState, GradientState

        # A process may call several verbs, each on a device and in a precision of its own.
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return run(**preset, **given)

    call.__name__ = call.__qualname__ = verb
    call.__module__ = "kdcli"
    call.__doc__ = f"{inspect.getdoc(run)} The options are those of `kdcli {verb}`. Raises kdcli.errors.KdcliError."
    call.__signature__ = known  # type: ignore[attr-defined]
    return call
