"""Verbs of the command line. A verb's options are built from its settings when it is used."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import typer

from kdcli.cli.app import app
from kdcli.cli.help import Command
from kdcli.cli.libraries import prepare_libraries
from kdcli.custom_code import custom_code
from kdcli.errors import UsageError, check_known, reason

if TYPE_CHECKING:
    from kdcli.cli.parameters import Parameter
    from kdcli.recipe.resolve import Resolved
    from kdcli.recipe.sections import RunOptions, Section

OptionsT = TypeVar("OptionsT")
RecipeT = TypeVar("RecipeT", bound="Section")

COMPRESS, TRAIN, MEASURE, SHIP, INSPECT = "Compress", "Train", "Measure", "Ship", "Inspect"
"""The headings of `kdcli --help`."""

HUB_MODEL = r"(\w[\w.-]*/)?\w[\w.-]*"
"""A model on the hub: `owner/name`, or `name`."""

PRINTING = ("json", "quiet", "verbose")
LOADING = ("output_dir", "overwrite", "revision", "trust_remote_code", *PRINTING)
SAVING = ("push_to_hub", "strict_data", *LOADING)
SCORING = ("recipe", "sets", "device", "strict_data", *LOADING)
TRAINING = ("processes", "resume", "dry_run", "report_to", "push_to_hub", *SCORING)


@dataclass(frozen=True)
class Verb:
    """A verb.

    Attributes:
        name: The name of the verb and of its folder in kdcli/verbs.
        function: Runs the verb with the values from the user.
        settings: The name of the module with RECIPES and OPTIONS: the recipe's settings model, and
            the class of the settings that are not recipe keys, by the name of the verb.
        shared: The names of the options that the verb shares with other verbs.
        examples: Command lines, for help.
        page: The page of the documentation, without its extension.
    """

    name: str
    function: Callable[[Given], Printable | None]
    settings: str
    shared: tuple[str, ...]
    examples: tuple[str, ...]
    page: str

    @property
    def description(self) -> str:
        """The docstring of the function, which help shows."""
        return inspect.getdoc(self.function) or ""

    @property
    def recipe(self) -> type[Section] | None:
        """The settings model of the verb's recipes, or None."""
        module = importlib.import_module(self.settings)
        recipes: Mapping[str, type[Section]] = getattr(module, "RECIPES", {})
        return recipes.get(self.name)

    @property
    def options(self) -> type | None:
        """The class of the run settings that only this verb has, or None."""
        options: Mapping[str, type] = getattr(importlib.import_module(self.settings), "OPTIONS", {})
        return options.get(self.name)

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """The verb's arguments and options."""
        from kdcli.cli.parameters import parameters_of
        from kdcli.recipe.sections import CommandOptions, RunOptions

        return parameters_of(
            self.name,
            recipe=self.recipe,
            options=self.options,
            shared=dict.fromkeys((CommandOptions, RunOptions), self.shared),
        )

    def callback(self) -> Callable[..., Any]:
        """Return a function with one parameter for each option, for Typer."""

        def run(**values: Any) -> Printable | None:
            return self.run(values, tuple(sys.argv[1:]))

        parameters = [each.typer_parameter() for each in self.parameters]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    def run(self, values: Mapping[str, Any], arguments: tuple[str, ...] = ()) -> Printable | None:
        """Run the verb.

        Args:
            values: The value of every parameter.
            arguments: The words of the command line; empty if Python calls the verb.

        Raises:
            UsageError: Options contradict each other, or a value is not allowed.
        """
        from kdcli.data.accounts import ACCOUNTS
        from kdcli.disk import COMMITS, HASHES

        # Python may run several verbs in this process.
        COMMITS.clear()
        HASHES.clear()
        ACCOUNTS.clear(strict=bool(values.get("strict_data", False)))
        given = Given(self, dict(values), arguments)
        prepare_libraries(
            given.values.get("quiet", False),
            given.values.get("verbose", False),
            is_command=given.values.get("json", False) is not None,
        )
        if "processes" in given.values:
            _join()
        given.check_conflicts()
        given.warn_of_repeats()
        given.pin_revision()
        given.check_values()
        repository = given.values.get("push_to_hub")
        if repository is None:
            return self._call(given)
        from kdcli.report.publish import Upload, check_repository, publish

        check_repository(repository)
        result = self._call(given)
        if result is not None:
            assert isinstance(result, Saved)
            typer.echo(publish(Upload.of(result.folder), repository).sentence, err=True)
        return result

    def _call(self, given: Given) -> Printable | None:
        from kdcli.data.accounts import ACCOUNTS
        from kdcli.data.readers import COLUMN_HINT

        try:
            with custom_code(bool(given.values.get("trust_remote_code"))):
                return self.function(given)
        except UsageError as error:
            if error.hint is not None:
                own_hint = f"{COLUMN_HINT} with {self._column_option()}"
                error.hint = error.hint.replace(COLUMN_HINT, own_hint)
            raise
        finally:
            # Functions that Python calls afterwards have no --strict-data.
            ACCOUNTS.strict = False

    def _column_option(self) -> str:
        """Return the option that names the column of a text."""
        from kdcli.recipe.options import settings_of

        models = [model for model in (self.recipe, self.options) if model is not None]
        keys = {each.key for model in models for each in settings_of(model)}
        if "column" in keys:
            return "--column NAME"
        return f"--set {'data.column' if 'data.column' in keys else 'data.columns.text'}=NAME"


class Given:
    """The values that the user gave to a verb: recipe keys and run settings."""

    def __init__(self, verb: Verb, values: dict[str, Any], arguments: tuple[str, ...] = ()) -> None:
        self.verb, self.values, self.arguments = verb, values, arguments

    @property
    def recipe(self) -> str | None:
        """The value of `--recipe`. `--resume -o RUN` continues a run with its own recipe.

        Options and `--set` change the recipe of the run. A command that names its model is whole,
        and its recipe is compared with the one of the run.

        Raises:
            UsageError: There is no such run.
        """
        from kdcli.disk import RECIPE_FILE, near_path

        given: str | None = self.values["recipe"]
        folder = self.values.get("output_dir") if self.values.get("resume") else None
        arguments = (each for each in self.verb.parameters if each.option.is_argument)
        is_whole = any(self.values[each.name] for each in arguments)
        if given is not None or folder is None or is_whole:
            return given
        saved = Path(folder) / RECIPE_FILE
        if not saved.is_file():
            if self.keys() or self.sets:
                return None
            raise UsageError(
                f"{folder} holds no run to resume{near_path(str(folder))}",
                "give the directory of the run; or the model and the options of a new one",
            )
        return str(saved)

    @property
    def sets(self) -> list[str]:
        """The values of `--set`."""
        return self.values["sets"] or []

    @property
    def run_options(self) -> RunOptions:
        """Where and how to run."""
        from kdcli.recipe.sections import RunOptions

        return replace(self.of(RunOptions), arguments=self.arguments)

    def __getitem__(self, name: str) -> Any:
        """Return a parameter's value; None if it was not given."""
        return self.values[name]

    def check_conflicts(self) -> None:
        """Raise a UsageError if two options contradict each other."""
        by_flag = {flag: each for each in self.verb.parameters for flag in _flags(each)}
        for parameter in self.verb.parameters:
            flag = parameter.option.flag
            if not self._is_given(parameter, flag):
                continue
            for other in parameter.option.excludes:
                if other in by_flag and self._is_given(by_flag[other], other):
                    second = other if other.startswith("-") else "a model"
                    message = f"{flag} and {second} contradict each other"
                    raise UsageError(message, "give one of them")

    def warn_of_repeats(self) -> None:
        """Warn of recipe keys and options with several values.

        The last one counts, and options override `--set`.
        """
        from kdcli.messages import warn

        sets = (pair.partition("=") for pair in self.values.get("sets") or [])
        values = [(key.strip(), f"--set {key.strip()}", value.strip()) for key, _, value in sets]
        words = list(zip(self.arguments, (*self.arguments[1:], ""), strict=False))
        for parameter in self.verb.parameters:
            option, flags = parameter.option, _flags(parameter)
            if option.is_argument or parameter.is_list or parameter.kind is bool:
                continue
            parts = ((word.partition("="), after) for word, after in words)
            key = parameter.key if parameter.is_recipe_key else option.flag
            values += [
                (key, option.flag, (value if equals else after).strip())
                for (name, equals, value), after in parts
                if name in flags
            ]
        for key in dict.fromkeys(key for key, _, _ in values):
            of_key = [(name, value) for other, name, value in values if other == key]
            given = [value for _, value in of_key]
            if len(set(given)) > 1:
                names = " and ".join(dict(of_key))
                warn(f"several values of {names}: {', '.join(given)}; {given[-1]} counts")

    def check_values(self) -> None:
        """Raise a UsageError for a value that is certainly wrong, before torch is loaded."""
        from kdcli.cli.parameters import VALUES
        from kdcli.engine.processes import joined

        for parameter in self.verb.parameters:
            value, kind = self.values.get(parameter.name), parameter.option.values
            # pydantic refuses values of other types.
            values = [v for v in _listed(value) if isinstance(v, str | Path)]
            if parameter.name == "method":
                for each in values:
                    check_known("method", str(each), sorted(parameter.choices))
            # A bool is an int too, and an option that is on or off is never wrong.
            if isinstance(value, bool):
                continue
            if isinstance(value, int | float) and parameter.is_recipe_key:
                _check_number(value, parameter)
            # Only one process of a run may try its output directory.
            if kind is None or (kind == "output" and joined()):
                continue
            if (check := VALUES[kind].check) is not None:
                for each in values:
                    check(str(each))

    def pin_revision(self) -> None:
        """Apply `--revision` to the verb's model.

        Raises:
            UsageError: The model has no revisions.
        """
        if (revision := self.values.get("revision")) is not None:
            model = self.verb.parameters[0].name
            self.values[model] = pinned(self.values[model], revision)

    def keys(self) -> dict[str, object]:
        """Return the values of the recipe keys that were given as options."""
        keys: dict[str, object] = {}
        switches: dict[str, object] = {}
        for parameter in self.verb.parameters:
            value = self.values[parameter.name]
            if parameter.is_recipe_key and value is not None:
                keys[parameter.key] = _value(parameter, value)
            if parameter.switch is not None and self._is_given(parameter, parameter.option.flag):
                switches[parameter.switch] = True
        return keys | {key: value for key, value in switches.items() if key not in keys}

    def resolve(
        self,
        model: type[RecipeT],
        above: Mapping[str, Mapping[str, object]] | None = None,
    ) -> Resolved[RecipeT]:
        """Return the recipe that the user gave.

        Args:
            model: The settings model of the recipe.
            above: Values that override all others, by origin.

        Raises:
            UsageError: The recipe or a key is not allowed.
        """
        from kdcli.recipe.resolve import resolve

        recipe = self.recipe if "recipe" in self.values else None
        return resolve(model, recipe=recipe, sets=self.sets, options=self.keys(), above=above)

    def of(self, options: type[OptionsT]) -> OptionsT:
        """Return the run settings of a class.

        Raises:
            UsageError: A value is not allowed.
        """
        from pydantic import ValidationError

        from kdcli.recipe.resolve import suggestion

        values: dict[str, Any] = {}
        flags: dict[str, str] = {}
        for parameter in self.verb.parameters:
            if parameter.model is not options:
                continue
            flags[parameter.key] = parameter.option.flag
            if self.values.get(parameter.name) is not None:
                values[parameter.key] = _value(parameter, self.values[parameter.name])
        try:
            return options(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            flag = flags[str(problem["loc"][0])]
            given = f"got {problem['input']}{suggestion(problem)}"
            raise UsageError(f"{flag} {reason(problem)}, {given}") from None

    def show(self, result: ResultT) -> ResultT:
        """Print a result and return it. Nothing is printed from Python, where `json` is None."""
        return show(result, as_json=self.values.get("json", False))

    def _is_given(self, parameter: Parameter, flag: str) -> bool:
        """Return whether an option was given. `--no-X` was given if the value is False."""
        value = self.values.get(parameter.name)
        if flag.startswith("--no-"):
            return value is False
        return value is not None and value is not False and value != []


def verb(
    *shared: str,
    examples: tuple[str, ...],
    panel: str | None = None,
    page: str | None = None,
    group: typer.Typer = app,
) -> Callable[[Callable[[Given], Printable | None]], Verb]:
    """Make a function a verb of the command line.

    Args:
        shared: The names of the options that the verb shares with other verbs.
        examples: Command lines that help shows.
        panel: The heading under which `kdcli --help` lists the verb.
        page: The page of the documentation (default: the name of the verb).
        group: The application, or the group of verbs that the verb belongs to.
    """

    def decorate(function: Callable[[Given], Printable | None]) -> Verb:
        package = function.__module__.removesuffix(".cli")
        # A verb may be a keyword of Python, so that its function ends in an underscore.
        name = function.__name__.rstrip("_")
        settings = f"{package}.settings"
        command = Verb(name, function, settings, shared, examples, page or name)

        def placeholder() -> None:
            """Stand in for the callback, which `VerbCommand` builds when the verb is used."""

        placeholder.verb = command  # type: ignore[attr-defined]
        group.command(
            command.name,
            cls=VerbCommand,
            help=command.description,
            rich_help_panel=panel,
        )(placeholder)
        return command

    return decorate


class VerbCommand(Command):
    """A command whose parameters are built when it is used. `kdcli --help` builds none."""

    def __init__(self, **attributes: Any) -> None:
        self.verb: Verb = attributes["callback"].verb
        self.examples, self.page = self.verb.examples, self.verb.page
        super().__init__(**attributes)

    @functools.cached_property
    def _built(self) -> Any:
        single = typer.Typer(add_completion=False)
        single.command()(self.verb.callback())
        return typer.main.get_command(single)

    @property
    def rare(self) -> set[str]:
        """The names of the options that few people need."""
        return {each.name for each in self.verb.parameters if each.option.rare}

    @property
    def params(self) -> list[Any]:
        """The parameters, built from the verb's settings."""
        return self._built.params  # type: ignore[no-any-return]

    @params.setter
    def params(self, value: list[Any]) -> None:
        """Ignore the parameters of the placeholder."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Let the environment and pyproject.toml give the defaults of options."""
        from kdcli.recipe.defaults import option_defaults

        return super().make_context(*args, default_map=option_defaults(), **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        self.callback = self._built.callback
        return super().invoke(ctx)


def _value(parameter: Parameter, value: object) -> object:
    """Convert an option's value to its field's type."""
    return parameter.option.parse(value) if parameter.option.parse is not None else value


def _listed(value: object) -> list[object]:
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _check_number(value: float, parameter: Parameter) -> None:
    """Raise a UsageError for a number that a recipe cannot hold."""
    from kdcli.recipe.resolve import resolve

    resolve(parameter.model, recipe=None, options={parameter.key: _value(parameter, value)})


def _flags(parameter: Parameter) -> list[str]:
    """Return every flag of a parameter. `--augment/--no-augment` has two flags."""
    return [flag for flags in parameter.option.flags for flag in flags.split("/")]


def _join() -> None:
    """Connect to the other processes of the run before any of them can fail."""
    from kdcli.engine.processes import joined

    if joined():
        from kdcli.engine.peers import join

        join()


def pinned(model: str | list[str] | None, revision: str) -> str | list[str]:
    """Add `@REVISION` to a verb's only model.

    Args:
        model: A model, or a list with one model.
        revision: A branch, a tag or a commit.

    Raises:
        UsageError: There is not exactly one model, the model is not on the hub, or it names
            another revision.
    """
    from kdcli.disk import EMBEDDED, is_path

    if isinstance(model, list) and len(model) == 1:
        return [str(pinned(model[0], revision))]
    if not model or isinstance(model, list):
        number = "several were" if model else "none was"
        raise UsageError(
            f"--revision applies to one model, but {number} given",
            "write MODEL@REV for each, or in the recipe",
        )
    name, at, current = model.partition("@")
    if is_path(model) or name in EMBEDDED or not re.fullmatch(HUB_MODEL, name):
        raise UsageError(f"{model} has no revisions: it is not on the hub", "remove --revision")
    if not re.fullmatch(r"[\w./-]+", revision):
        raise UsageError(f"--revision takes a branch, a tag or a commit, got '{revision}'")
    if at and current != revision:
        message = f"{model} and --revision {revision} contradict each other"
        raise UsageError(message, "give one of them")
    return f"{name}@{revision}"


class Printable(Protocol):
    """The result of a verb, such as a report or an estimate."""

    def to_json(self) -> str:
        """Return the result as JSON, for `--json`."""
        ...

    def renderables(self) -> Iterable[object]:
        """Yield the parts that rich prints to a terminal."""
        ...


@runtime_checkable
class Saved(Protocol):
    """A result with a directory, which `--push-to-hub` pushes."""

    @property
    def folder(self) -> Path:
        """The directory."""
        ...


ResultT = TypeVar("ResultT", bound=Printable | None)


def show(result: ResultT, *, as_json: bool | None) -> ResultT:
    """Print a result as JSON or for a terminal, and return it.

    Args:
        result: The result; None in a process that prints nothing.
        as_json: Whether to print JSON. None prints nothing, for calls from Python.
    """
    if result is None or as_json is None:
        return result
    if as_json:
        typer.echo(result.to_json())
        return result
    from rich.console import Console

    console = Console()
    for part in result.renderables():
        console.print(part)
    return result
