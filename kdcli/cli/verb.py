"""A verb of the command line, whose options come from its settings once it is used."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperCommand

from kdcli.cli.app import app
from kdcli.cli.libraries import prepare_libraries
from kdcli.cli.revision import pinned
from kdcli.cli.show import show
from kdcli.errors import UsageError

if TYPE_CHECKING:
    from kdcli.cli.parameters import Declaration, Parameter
    from kdcli.recipe.sections import RunOptions

T = TypeVar("T")

PRINTING = ("json", "quiet", "verbose")
LOADING = ("output_dir", "overwrite", "revision", "trust_remote_code", *PRINTING)
SAVING = ("push_to_hub", *LOADING)
SCORING = ("recipe", "sets", "device", *LOADING)
TRAINING = ("processes", "resume", "dry_run", "report_to", "push_to_hub", *SCORING)


@dataclass(frozen=True)
class Verb:
    """A verb.

    Attributes:
        name: Its name, and its folder's in kdcli/verbs.
        function: Runs the verb with the given values.
        settings: The module with RECIPES, kind -> recipe model, and OPTIONS, name of the
            verb -> class of the settings that are no recipe keys.
        shared: Names of the options that it shares with other verbs.
        example: A command line, for help.
    """

    name: str
    function: Callable[[Given], Any]
    settings: str
    shared: tuple[str, ...]
    example: str

    @property
    def description(self) -> str:
        """The docstring of the function, for help."""
        return inspect.getdoc(self.function) or ""

    @property
    def recipes(self) -> Mapping[str, Any]:
        """The recipe models of the verb, by kind."""
        return getattr(importlib.import_module(self.settings), "RECIPES", {})

    @property
    def options(self) -> Any:
        """The class of the run settings that only this verb has, or None."""
        options = getattr(importlib.import_module(self.settings), "OPTIONS", {})
        return options.get(self.name)

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """The verb's arguments and options."""
        from kdcli.cli.parameters import parameters_of
        from kdcli.recipe.sections import CommandOptions, RunOptions

        return parameters_of(
            self.name,
            recipes=self.recipes,
            options=self.options,
            shared=dict.fromkeys((CommandOptions, RunOptions), self.shared),
        )

    def callback(self) -> Callable[..., Any]:
        """Return a function with a parameter for each option, as Typer reads it."""

        def run(**values: Any) -> Any:
            return self.run(values)

        parameters = [each.typer_parameter() for each in self.parameters]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    def run(self, values: Mapping[str, Any]) -> Any:
        """Run the verb. Raises UsageError: options that contradict each other, or a wrong value.

        Args:
            values: The value of every parameter.
        """
        from kdcli.disk import COMMITS

        # Python may run several verbs in this process.
        COMMITS.clear()
        given = Given(self, dict(values))
        prepare_libraries(given.values.get("quiet", False), given.values.get("verbose", False))
        if "processes" in given.values:
            _join()
        given.check_conflicts()
        given.pin_revision()
        repository = given.values.get("push_to_hub")
        if repository is None:
            return self.function(given)
        from kdcli.report.publish import Upload, check_repository, publish

        check_repository(repository)
        result = self.function(given)
        if result is not None:
            typer.echo(publish(Upload.of(result.folder), repository).sentence, err=True)
        return result


class Given:
    """The values that the user gave to a verb: recipe keys and run settings."""

    def __init__(self, verb: Verb, values: dict[str, Any]) -> None:
        self.verb, self.values = verb, values

    @property
    def recipe(self) -> str | None:
        """The value of `--recipe`."""
        return self.values["recipe"]  # type: ignore[no-any-return]

    @property
    def sets(self) -> list[str]:
        """The values of `--set`."""
        return self.values["sets"] or []

    @property
    def kind_of_recipe(self) -> str | None:
        """The kind of the recipe that `--recipe` names. Raises UsageError: an unknown kind."""
        from kdcli.recipe.resolve import verb_of

        return verb_of(self.recipe) if self.recipe is not None else None

    @property
    def run_options(self) -> RunOptions:
        """Where and how to run. Raises UsageError: a value that is not allowed."""
        from kdcli.recipe.sections import RunOptions

        return replace(self.of(RunOptions), arguments=tuple(sys.argv[1:]))

    def __getitem__(self, name: str) -> Any:
        """Return a parameter's value, None if it was not given."""
        return self.values[name]

    def check_conflicts(self) -> None:
        """Raise a UsageError for options that contradict each other."""
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

    def pin_revision(self) -> None:
        """Add `--revision` to the verb's model. Raises UsageError if the model has no revisions."""
        if (revision := self.values.get("revision")) is not None:
            model = self.verb.parameters[0].name
            self.values[model] = pinned(self.values[model], revision)

    def fits(self, kind: str) -> bool:
        """Tell whether every given option belongs to a kind of recipe of the verb."""
        return all(
            kind in parameter.kinds(self.verb.recipes)
            for parameter in self.verb.parameters
            if self._is_given(parameter, parameter.option.flag)
        )

    def keys(self, kind: str) -> dict[str, Any]:
        """Return the recipe keys that were given. Raises UsageError: one of another recipe.

        Args:
            kind: The kind of recipe, a key of the verb's RECIPES.
        """
        keys: dict[str, Any] = {}
        switches: dict[str, bool] = {}
        for parameter in self.verb.parameters:
            is_given = self._is_given(parameter, parameter.option.flag)
            declaration = parameter.by_model.get(kind, parameter.first)
            if kind not in parameter.kinds(self.verb.recipes):
                if is_given:
                    raise self._misplaced(parameter, kind)
                continue
            if parameter.is_recipe_key and (value := self.values[parameter.name]) is not None:
                keys[declaration.key] = _value(declaration, value)
            if declaration.switch is not None and is_given:
                switches[declaration.switch] = True
        return switches | keys

    def of(self, options: type[T]) -> T:
        """Return the run settings of a class. Raises UsageError: a value that is not allowed."""
        from pydantic import ValidationError

        from kdcli.recipe.resolve import reason

        values: dict[str, Any] = {}
        flags: dict[str, str] = {}
        for parameter in self.verb.parameters:
            declaration = parameter.by_model.get(options.__name__)
            if declaration is None:
                continue
            flags[declaration.key] = parameter.option.flag
            if self.values.get(parameter.name) is not None:
                values[declaration.key] = _value(declaration, self.values[parameter.name])
        try:
            return options(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            flag = flags[str(problem["loc"][0])]
            raise UsageError(f"{flag} {reason(problem)}, got {problem['input']}") from None

    def show(self, result: Any) -> Any:
        """Print a result and return it. From Python `json` is None, and nothing is printed."""
        return show(result, as_json=self.values.get("json", False))

    def _is_given(self, parameter: Parameter, flag: str) -> bool:
        """Tell whether an option was given; `--no-X` is given as False."""
        value = self.values.get(parameter.name)
        if flag.startswith("--no-"):
            return value is False
        return value is not None and value is not False and value != []

    def _misplaced(self, parameter: Parameter, kind: str) -> UsageError:
        """Return the error for an option of another kind of recipe."""
        from kdcli.cli.parameters import listed

        flag, recipes = parameter.option.flag, self.verb.recipes
        chosen = recipes[kind]
        purposes = listed(recipes[each].purpose for each in parameter.kinds(recipes))
        if "task" not in chosen.model_fields:
            return UsageError(f"{flag} needs --task", f"it belongs to {purposes}")
        message = f"{flag} belongs to {purposes}, not to {chosen.purpose}"
        return UsageError(message, chosen.instead.get(flag))


def verb(
    *shared: str, example: str, group: typer.Typer = app
) -> Callable[[Callable[[Given], Any]], Verb]:
    """Make a function a verb of the command line.

    Args:
        shared: Names of the options that it shares with other verbs.
        example: A command line that help shows.
        group: The application, or the group of verbs that the verb belongs to.
    """

    def decorate(function: Callable[[Given], Any]) -> Verb:
        package = function.__module__.removesuffix(".cli")
        command = Verb(function.__name__, function, f"{package}.settings", shared, example)

        def placeholder() -> None:
            """Stand in for the callback, which `VerbCommand` builds when it is needed."""

        placeholder.verb = command  # type: ignore[attr-defined]
        group.command(
            command.name,
            cls=VerbCommand,
            help=command.description,
            epilog=f"Example: {example}",
        )(placeholder)
        return command

    return decorate


class VerbCommand(TyperCommand):
    """A command whose parameters are built when it is used, so that `kdcli --help` reads none."""

    def __init__(self, **attributes: Any) -> None:
        self.verb: Verb = attributes["callback"].verb
        super().__init__(**attributes)

    @functools.cached_property
    def _built(self) -> Any:
        single = typer.Typer(add_completion=False)
        single.command()(self.verb.callback())
        return typer.main.get_command(single)

    @property
    def params(self) -> list[Any]:
        """The parameters, built from the verb's settings."""
        return self._built.params  # type: ignore[no-any-return]

    @params.setter
    def params(self, value: list[Any]) -> None:
        """Ignore the parameters of the placeholder."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        self.callback = self._built.callback
        return super().invoke(ctx)


def _value(declaration: Declaration, value: Any) -> Any:
    """Return an option's value as the field takes it. Raises UsageError: several for a single."""
    if declaration.option.parse is not None:
        return declaration.option.parse(value)
    if isinstance(value, list) and declaration.option.kind is None and not declaration.is_list:
        if len(value) > 1:
            flag, purpose = declaration.option.flag, declaration.purpose
            raise UsageError(f"{flag} takes one value for {purpose}, got {len(value)}")
        return value[0]
    return value


def _flags(parameter: Parameter) -> list[str]:
    """Return every flag of a parameter: `--augment/--no-augment` are two."""
    return [flag for flags in parameter.option.flags for flag in flags.split("/")]


def _join() -> None:
    """Meet the other processes of the run before any of them can fail."""
    from kdcli.engine.processes import joined

    if joined():
        from kdcli.engine.peers import join

        join()
