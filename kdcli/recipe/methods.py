"""Find the methods of `kdcli.losses` and `kdcli.pruners`.

A loss is a file that defines `objective`, and a pruner is a file that defines `pruner`. A method is
named after its file, with `-` for `_`. Help, recipes and messages read the folder, so a new method
is one new file.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import PydanticKnownError

from kdcli.errors import UsageError, check_known, did_you_mean, in_words, key_of, reason
from kdcli.recipe.options import settings_of

SettingsT = TypeVar("SettingsT", bound=BaseModel)


@functools.cache
def method_names(package: str, function: str, *inputs: str) -> list[str]:
    """Return the names of a package's methods. This reads their source and imports nothing.

    Args:
        package: The package whose files are methods.
        function: The function that a method's file defines.
        inputs: If given, return only methods whose `INPUTS` contain one of these.
    """
    spec = find_spec(package)
    assert spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    reads_input = rf'^INPUTS = .*"({"|".join(inputs)})"' if inputs else ""
    names = []
    for file in files:
        source = file.read_text("utf-8")
        is_method = re.search(rf"^def {function}\(", source, re.MULTILINE)
        if is_method and re.search(reads_input, source, re.MULTILINE):
            names.append(file.stem.replace("_", "-"))
    return names


def known_method(names: Iterable[str]) -> AfterValidator:
    """Return a validator of a method, which refuses unknown names as a `Literal` does."""
    *others, last = known = sorted(names)
    expected = f"{', '.join(map(repr, others))} or {last!r}"

    def check(method: str) -> str:
        if method not in known:
            raise PydanticKnownError("literal_error", {"expected": expected})
        return method

    return AfterValidator(check)


class Methods:
    """The methods of a package.

    Args:
        package: The package whose files are methods.
        function: The function that a method's file defines.
        section: The recipe section that holds the keys of a method's `Settings`.
    """

    def __init__(self, package: str, function: str, section: str) -> None:
        self.package, self.function, self.section = package, function, section

    def names(self) -> list[str]:
        """Return the names of all methods."""
        return list(method_names(self.package, self.function))

    def module(self, method: str) -> ModuleType:
        """Import a method's file.

        Raises:
            UsageError: The method is unknown.
        """
        check_known("method", method, self.names())
        return importlib.import_module(f"{self.package}.{method.replace('-', '_')}")

    def settings(self, method: str, given: Mapping[str, object]) -> BaseModel:
        """Return a method's own settings from the recipe's section.

        Raises:
            UsageError: The method or a key is unknown, or a value is not allowed.
        """
        model: type[BaseModel] = self.module(method).Settings
        return own_settings(model, given, self.section, f"method {method}")


def own_settings(
    model: type[SettingsT], given: Mapping[str, object], section: str, owner: str
) -> SettingsT:
    """Return the settings of a method or a workload from their section of a recipe.

    Args:
        model: The settings model.
        given: The keys of the section.
        section: The name of the section.
        owner: The method or the workload, such as `method minilm`.

    Raises:
        UsageError: A key is unknown, or a value is not allowed.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        known, lines = [setting.key for setting in settings_of(model)], []
        for problem in error.errors():
            key = key_of(problem["loc"], given)
            name = in_words(f"{section}.{key}") if key else f"'{section}':"
            if problem["type"] == "extra_forbidden":
                near = did_you_mean(key, known, f"{section}.")
                lines.append(f"unknown key {name} of {owner}{near}")
            else:
                lines.append(f"{name} {reason(problem)}, got {problem['input']!r}")
        allowed = ", ".join(f"{section}.{name}" for name in known)
        raise UsageError("\n".join(lines), f"keys of {owner}: {allowed}") from None
