"""Declare how a recipe key or a run setting becomes an option of the command line.

A field of a settings model declares its option next to its type:

    lr: Annotated[float, Option("--lr", panel=TRAINING)] = Field(3e-4, description="Peak ...")

The command line, the Python functions, their type stub and docs/reference/ come from these
declarations. Nothing here imports pydantic, so that `kdcli --help` stays fast.
"""

import copy
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import ConfigDict
    from pydantic.fields import FieldInfo

GOAL, DATA, ON_TASK = "Goal", "Task and data", "With --task"
TRAINING, RECIPE, RUN, OUTPUT = "Training", "Recipe", "Run", "Output"
PANELS = ("Options", GOAL, DATA, ON_TASK, TRAINING, RECIPE, RUN, OUTPUT)
"""The panels of `kdcli VERB --help`, in their order."""


OF_OPTIONS: "ConfigDict" = {"allow_inf_nan": False, "use_attribute_docstrings": True}
"""The configuration of dataclasses of options. The docstring below a field is its description."""


class Option:
    """An option of the command line that sets a field.

    Args:
        flags: Flags such as `--output-dir`, `-o`. A word without dashes is a positional argument.
        name: The parameter's name in Python (default: the name of the first flag).
        panel: The heading under which help lists the option.
        metavar: The placeholder for the option's value in help.
        kind: The type of the option's value, if it differs from the field's type.
        parse: Converts the option's value to the field's value. May raise UsageError.
        key: The key inside a field that holds a free mapping, such as `masking` in `pruner`.
        description: The description of the option (default: the field's description).
        choices: Allowed values, for help and completion (default: the values of a `Literal`
            field).
        values: The kind of the values, a key of `VALUES` in kdcli/cli/parameters.py; it gives the
            completion of the shell and early checks.
        enables: A key in the same section, which the option sets to true.
        show_default: Whether help shows the field's default.
        excludes: Flags or arguments that contradict this option.
        required: Whether the option must be given although its field has a default.
        verb: The only verb with the option, if several verbs share the model.
        terminal: Whether only the command line has the option.
        rare: Whether only `--help-all` shows the option.
    """

    def __init__(
        self,
        *flags: str,
        name: str | None = None,
        panel: str = "Options",
        metavar: str | None = None,
        kind: Any = None,
        parse: Callable[[Any], object] | None = None,
        key: str | None = None,
        description: str | None = None,
        choices: tuple[str, ...] = (),
        values: str | None = None,
        enables: str | None = None,
        show_default: bool = True,
        excludes: tuple[str, ...] = (),
        required: bool = False,
        verb: str | None = None,
        terminal: bool = False,
        rare: bool = False,
    ) -> None:
        self.flags = flags
        self.name = name or flags[0].lstrip("-").split("/")[0].replace("-", "_")
        self.panel, self.metavar = panel, metavar
        self.kind, self.parse, self.key = kind, parse, key
        self.description, self.choices = description, choices
        self.values, self.enables, self.excludes = values, enables, excludes
        self.required, self.verb, self.terminal = required, verb, terminal
        self.show_default, self.rare = show_default, rare

    def of(self, verb: str, description: str) -> "Option":
        """Return a copy of this option for one verb, with its own description."""
        own = copy.copy(self)
        own.verb, own.description = verb, description
        return own

    @property
    def is_argument(self) -> bool:
        """Whether the option is a positional argument."""
        return not self.flags[0].startswith("-")

    def key_of(self, field: str) -> str:
        """Return the dotted recipe key that the option sets in a field."""
        return f"{field}.{self.key}" if self.key else field

    @property
    def flag(self) -> str:
        """The flag that messages use."""
        return self.flags[0].split("/")[0]


@dataclass(frozen=True)
class Setting:
    """A field of a settings model, for the command line and the documentation.

    Attributes:
        key: The dotted recipe key.
        kind: The type of its value.
        default: The default value; None if the field is required.
        is_required: Whether the field has no default.
        description: One sentence.
        options: The options that set the field.
        choices: The values of a `Literal`.
    """

    key: str
    kind: Any
    default: object
    is_required: bool
    description: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]


def section_of(annotation: object) -> type | None:
    """Return the settings model in the type of a field, or None."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and hasattr(candidate, "__pydantic_fields__"):
            return candidate
    return None


@functools.cache
def settings_of(model: type) -> tuple[Setting, ...]:
    """Return every field of a settings model and of its sections, with dotted keys.

    Args:
        model: A pydantic model, or a pydantic dataclass.
    """
    fields = _fields_of(model)
    # A recipe may override the defaults of a section.
    defaults = None if any(info.is_required() for info in fields.values()) else model()
    return tuple(_settings(model, "", defaults))


def _fields_of(model: type) -> "Mapping[str, FieldInfo]":
    return model.__pydantic_fields__  # type: ignore[attr-defined, no-any-return]


def _settings(model: type, prefix: str, defaults: object) -> Iterator[Setting]:
    for name, info in _fields_of(model).items():
        if defaults is not None:
            default = getattr(defaults, name)
        else:
            default = None if info.is_required() else info.get_default()
        if section := section_of(info.annotation):
            yield from _settings(section, f"{prefix}{name}.", default)
            continue
        yield Setting(
            key=f"{prefix}{name}",
            kind=info.annotation,
            default=default,
            is_required=info.is_required(),
            description=" ".join((info.description or "").split()),
            options=tuple(each for each in info.metadata if isinstance(each, Option)),
            choices=choices_of(info.annotation),
        )


def choices_of(annotation: object) -> tuple[str, ...]:
    """Return the values of a `Literal`, or of the `Literal` types in a union."""
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(
        choice
        for part in typing.get_args(annotation)
        if typing.get_origin(part) is Literal
        for choice in typing.get_args(part)
    )


def plain_kind(annotation: object) -> Any:
    """Return a type without constraints and without None, such as `list[int]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return plain_kind(arguments[0])
    if origin is Literal:
        return str
    if origin in (typing.Union, types.UnionType):
        (kind,) = {plain_kind(part) for part in arguments if part is not type(None)}
        return kind
    if origin is list:
        return list[plain_kind(arguments[0])]  # type: ignore[misc]
    return annotation
