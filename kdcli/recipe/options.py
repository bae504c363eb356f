"""How a recipe key or a run setting becomes an option of the command line.

A field of a settings model declares its option next to its type:

    lr: Annotated[float, Option("--lr", panel=TRAINING)] = Field(3e-4, description="Peak ...")

The command line, the Python functions, their type stub and docs/reference.md come from these
declarations. Nothing here imports pydantic, so that `kdcli --help` stays fast.
"""

import functools
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

GOAL, DATA, ON_TASK = "Goal", "Task and data", "With --task"
TRAINING, RECIPE, RUN, OUTPUT = "Training", "Recipe", "Run", "Output"
PANELS = ("Options", GOAL, DATA, ON_TASK, TRAINING, RECIPE, RUN, OUTPUT)
"""The panels of `kdcli VERB --help`, in their order."""


class Option:
    """An option of the command line that sets a field.

    Args:
        flags: Such as `--output-dir`, `-o`. A word without dashes is an argument, given by place.
        name: The parameter's name in Python; by default the first flag's.
        panel: The heading under which help lists the option.
        metavar: The placeholder for the option's value in help.
        kind: The type of the option's value where it is not the field's.
        parse: Turns the option's value into the field's. May raise UsageError.
        key: The key inside a field that holds a free mapping, such as `masking` of `pruner`.
        description: Describes the option where the field's description does not.
        choices: Allowed values, for help and completion. By default the values of a `Literal`
        field.
        completion: Which values the shell offers: `task`, `recipe` or `shape`.
        enables: A key next to the field, which the option sets to true.
        show_default: Whether help shows the field's default.
        excludes: Flags or arguments that contradict this option.
        recipes: The kinds of recipe that the option goes with, if it sets no key of theirs.
        required: Whether the option must be given although its field has a default.
        verb: The only verb that has the option, where several share the model.
        terminal: Whether the option makes no sense in Python.
    """

    def __init__(
        self,
        *flags: str,
        name: str | None = None,
        panel: str = "Options",
        metavar: str | None = None,
        kind: Any = None,
        parse: Callable[[Any], Any] | None = None,
        key: str | None = None,
        description: str | None = None,
        choices: tuple[str, ...] = (),
        completion: str | None = None,
        enables: str | None = None,
        show_default: bool = True,
        excludes: tuple[str, ...] = (),
        recipes: tuple[str, ...] = (),
        required: bool = False,
        verb: str | None = None,
        terminal: bool = False,
    ) -> None:
        self.flags = flags
        self.name = name or flags[0].lstrip("-").split("/")[0].replace("-", "_")
        self.panel, self.metavar = panel, metavar
        self.kind, self.parse, self.key = kind, parse, key
        self.description, self.choices = description, choices
        self.completion, self.enables, self.excludes = completion, enables, excludes
        self.recipes, self.required = recipes, required
        self.verb, self.terminal, self.show_default = verb, terminal, show_default

    @property
    def is_argument(self) -> bool:
        """Whether the value is given by its place."""
        return not self.flags[0].startswith("-")

    @property
    def flag(self) -> str:
        """The option as messages name it."""
        return self.flags[0].split("/")[0]


@dataclass(frozen=True)
class Setting:
    """A field of a settings model as the command line and the documentation need it.

    Attributes:
        key: The dotted recipe key.
        kind: The type of its value.
        default: The default value; None where the field is required.
        is_required: Whether the field has no default.
        description: One sentence.
        options: The options that set the field.
        choices: The values of a `Literal`.
    """

    key: str
    kind: Any
    default: Any
    is_required: bool
    description: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]


def section_of(annotation: Any) -> Any:
    """Return the settings model that a field holds, or None."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if hasattr(candidate, "__pydantic_fields__"):
            return candidate
    return None


@functools.cache
def settings_of(model: Any) -> tuple[Setting, ...]:
    """Return every field of a settings model and of its sections, under dotted keys.

    Args:
        model: A pydantic model, or a pydantic dataclass.
    """
    fields = model.__pydantic_fields__
    # A recipe may give a section other defaults than the section's own.
    defaults = None if any(info.is_required() for info in fields.values()) else model()
    return tuple(_settings(model, "", defaults))


def _settings(model: Any, prefix: str, defaults: Any) -> Iterator[Setting]:
    for name, info in model.__pydantic_fields__.items():
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
            description=info.description or "",
            options=tuple(each for each in info.metadata if isinstance(each, Option)),
            choices=choices_of(info.annotation),
        )


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of a `Literal`, also of one inside a union."""
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(
        choice
        for part in typing.get_args(annotation)
        if typing.get_origin(part) is Literal
        for choice in typing.get_args(part)
    )


def plain_kind(annotation: Any) -> Any:
    """Return a type without constraints and without None: `list[int]` for a list of sizes."""
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
