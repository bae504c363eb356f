"""Build the parameters of a verb from the options that its settings models declare."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kdcli.recipe.options import Option, Setting

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Values:
    """A kind of value.

    Attributes:
        names: Returns the values that the shell completes; None for paths.
        check: Raises a KdcliError for a value that is certainly wrong.
    """

    names: Callable[[], Iterable[str]] | None = None
    check: Callable[[str], object] | None = None


def _tasks() -> list[str]:
    from kdcli.data.tasks import named_tasks
    from kdcli.types import OWN

    return [*named_tasks(), OWN]


def _check_task(name: str) -> None:
    from kdcli.data.tasks import task_of
    from kdcli.types import OWN
    from kdcli.workloads import modules_by_task

    # A colon separates a benchmark from its task, as in mteb:STS12.
    if name != OWN and ":" not in name and name not in modules_by_task():
        task_of(name)


def _recipes() -> list[str]:
    from kdcli.recipe.resolve import recipe_names

    return recipe_names()


def _shapes() -> list[str]:
    from kdcli.report.tables import published_shapes

    return [*published_shapes(), "static", "family"]


def _check_shape(text: str) -> None:
    from kdcli.models.grammar import FAMILY, is_static_shape, match_shape, parse_goal

    if text.strip() == FAMILY or parse_goal(text) is not None:
        return
    for shape in text.split(","):
        if not is_static_shape(shape):
            match_shape(shape)


def _backends() -> list[str]:
    from kdcli.deploy.backends import BACKENDS

    names = [f"{name}-{dtype}" for name, dtypes in BACKENDS.items() for dtype in dtypes]
    return [*BACKENDS, *names]


def _check_backend(text: str) -> None:
    from kdcli.deploy.backends import check_backend_name

    check_backend_name(text)


def _check_model(source: str) -> None:
    from kdcli.models.grammar import is_shape
    from kdcli.models.source import check_source

    if not is_shape(source):
        check_source(source)


def _check_teacher(source: str) -> None:
    from kdcli.models.source import check_address, is_address

    if is_address(source):
        check_address(source)
    else:
        _check_model(source)


def _check_data(source: str) -> None:
    from kdcli.data.sources import check_data_exists

    check_data_exists(source)


def _check_output_dir(path: str) -> None:
    from kdcli.disk import check_writable, user_path

    check_writable(user_path(path), directory=True)


VALUES: Mapping[str, Values] = {
    "task": Values(_tasks, _check_task),
    "recipe": Values(_recipes),
    "shape": Values(_shapes, _check_shape),
    "backend": Values(_backends, _check_backend),
    "device": Values(lambda: DEVICES),
    "model": Values(check=_check_model),
    "teacher": Values(check=_check_teacher),
    "data": Values(check=_check_data),
    "output": Values(check=_check_output_dir),
}
"""The kinds of value, by the names that `Option(values=...)` uses."""


UNITS = {"POINTS": "%", "FACTOR": "x", "MB": "MB", "MS": "ms", "SHARE": "%"}
"""Placeholder of an option -> the unit that its value may end in."""
PERCENT = 100
"""A share may be given in percent, the only unit that changes a number."""
PLACEHOLDERS = {int: "N", float: "X", str: "NAME", list[int]: "N", list[float]: "X"}
"""Placeholders for the values of options that declare none, by type."""
COMMA = re.compile(r"[+-]?\d+,\d+")
"""A number with a decimal comma."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a verb, as the field of a settings model declares it.

    Attributes:
        model: The settings model.
        setting: The field.
        option: The option that sets the field.
        is_recipe_key: Whether the field is a key of recipes.
    """

    model: type
    setting: Setting
    option: Option
    is_recipe_key: bool

    @property
    def name(self) -> str:
        """The name of the argument in Python."""
        return self.option.name

    @property
    def key(self) -> str:
        """The dotted key that the option sets."""
        return self.option.key_of(self.setting.key)

    @property
    def switch(self) -> str | None:
        """The key that the option also turns on."""
        if self.option.enables is None:
            return None
        section, dot, _ = self.setting.key.rpartition(".")
        return f"{section}{dot}{self.option.enables}"

    @property
    def kind(self) -> Any:
        """The type of the option's value, without None."""
        from kdcli.recipe.options import plain_kind

        return self.option.kind or plain_kind(self.setting.kind)

    @property
    def is_list(self) -> bool:
        """Whether the option may be repeated."""
        return typing.get_origin(self.kind) is list

    @property
    def is_required(self) -> bool:
        """Whether the user must give a value."""
        return self.setting.is_required or self.option.required

    @property
    def default(self) -> object:
        """The default. It is None for a recipe key, which then keeps the recipe's value."""
        return None if self.is_recipe_key else self.setting.default

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values; empty if the shell completes them instead."""
        if self.option.values is not None:
            return ()
        return self.option.choices or self.setting.choices

    @property
    def description(self) -> str:
        """The description of the option, without its default."""
        return self.option.description or self.setting.description

    @property
    def shown_default(self) -> str:
        """The default as help shows it; empty if the description explains the default."""
        if self.option.key is not None or not self.option.show_default:
            return ""
        return default_text(self.setting.default, self.option)

    @property
    def help(self) -> str:
        """The description with the allowed values and the default."""
        return help_sentence(self.description, self.choices, self.shown_default)

    def typer_parameter(self) -> inspect.Parameter:
        """Return the parameter in the form that Typer reads from a function's signature."""
        help_text = self.help
        if self.option.is_argument:
            information = typer.Argument(
                help=help_text,
                metavar=self.option.metavar,
                show_default=False,
                autocompletion=self._completion(),
            )
        else:
            information = typer.Option(
                *self.option.flags,
                help=help_text,
                metavar=self.option.metavar or PLACEHOLDERS.get(self.kind),
                show_default=False,
                autocompletion=self._completion(),
                parser=self._parser(),
                rich_help_panel=self.option.panel if self.option.panel != "Options" else None,
            )
        is_optional = not self.is_required and self.default is None
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if self.is_required else self.default,
            annotation=Annotated[self.kind | None if is_optional else self.kind, information],
        )

    def _parser(self) -> Callable[[str], float] | None:
        """Return the function that reads a float, perhaps with its unit; None for other types."""
        kind = typing.get_args(self.kind)[0] if self.is_list else self.kind
        if kind is not float:
            return None
        unit = UNITS.get(self.option.metavar or "", "")
        divisor = PERCENT if self.option.metavar == "SHARE" else 1

        def parse(text: str) -> float:
            # Typer also parses defaults, which are numbers.
            number = str(text).strip()
            has_unit = bool(unit) and number.lower().endswith(unit.lower())
            if has_unit:
                number = number[: -len(unit)].strip()
            try:
                return float(number) / (divisor if has_unit else 1)
            except ValueError:
                allowed = f"a number, or one with {unit}" if unit else "a number"
                comma = f"; write {number.replace(',', '.')}" if COMMA.fullmatch(number) else ""
                raise typer.BadParameter(f"takes {allowed}, got '{text}'{comma}") from None

        return parse

    def _completion(self) -> Callable[..., list[str]] | None:
        if self.option.flag == "--set":
            return _complete_key
        choices = self.choices
        names: Callable[[], Iterable[str]] | None = (lambda: choices) if choices else None
        if self.option.values is not None:
            names = VALUES[self.option.values].names
        if names is None:
            return None
        return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the recipe keys of a verb that begin like a word, each with its `=`."""
    from kdcli.recipe.resolve import leaf_keys

    model = ctx.command.verb.recipe  # type: ignore[attr-defined]
    return [f"{key}=" for key in leaf_keys(model) if key.startswith(incomplete)] if model else []


def parameters_of(
    verb: str,
    recipe: type | None,
    options: type | None,
    shared: Mapping[type, Iterable[str]],
) -> list[Parameter]:
    """Collect the parameters of a verb.

    Args:
        verb: The name of the verb. Some declarations apply to one verb only.
        recipe: The recipe's settings model, or None.
        options: The class of the run settings that only this verb has, or None.
        shared: Classes of run settings that verbs share, each with the names to include.
    """
    from kdcli.recipe.options import PANELS, settings_of

    parameters: dict[str, Parameter] = {}

    def add(model: type, is_recipe: bool, names: Iterable[str] | None = None) -> None:
        for setting in settings_of(model):
            for option in setting.options:
                is_taken = names is None or option.name in names
                if is_taken and option.verb in (None, verb):
                    parameters[option.name] = Parameter(model, setting, option, is_recipe)

    if recipe is not None:
        add(recipe, is_recipe=True)
    if options is not None:
        add(options, is_recipe=False)
    for model, names in shared.items():
        add(model, is_recipe=False, names=frozenset(names))
    return sorted(
        parameters.values(),
        key=lambda each: (not each.option.is_argument, PANELS.index(each.option.panel)),
    )


def help_sentence(description: str, choices: Iterable[str], default: str) -> str:
    """Return a description with the allowed values and the default in brackets at its end."""
    text = description.removesuffix(".")
    if explained := re.search(r" \((default: [^()]*)\)$", text):
        text, default = text[: explained.start()], explained[1].removeprefix("default: ")
    facts = [listed(choices)] if choices else []
    facts += [f"default: {default}"] if default else []
    return f"{text} ({'; '.join(facts)})." if facts else description


def listed(words: Iterable[str]) -> str:
    """Return `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def default_text(default: object, option: Option) -> str:
    """Return a default as help shows it; empty for None, False and empty values."""
    if isinstance(default, bool):
        return option.flag if default else ""
    if isinstance(default, float):
        return f"{default:g}".replace("e-0", "e-")
    if isinstance(default, list | tuple):
        return ", ".join(default_text(each, option) for each in default)
    return str(default) if default not in (None, {}) else ""
