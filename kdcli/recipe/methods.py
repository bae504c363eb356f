"""Methods as files: a file of `kdcli.losses` that defines `objective`, or of `kdcli.pruners` that defines `pruner`.

A method's name is its file's, with `-` for `_`. Help, recipes and messages read the folder, so a method is one file.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdcli.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel


@functools.cache
def method_names(package: str, function: str, *inputs: str) -> list[str]:
    """Names of a package's methods, read from the source: nothing is imported, so `--help` stays fast. `function`: what
    the file of a method defines. `inputs`: only methods whose `INPUTS` hold one of these."""
    spec = find_spec(package)
    assert spec is not None
    files = [
        p
        for folder in spec.submodule_search_locations or ()
        for p in sorted(Path(folder).glob("*.py"))
    ]
    sources = {file.stem.replace("_", "-"): file.read_text("utf-8") for file in files}
    wanted = rf'^INPUTS = .*"({"|".join(inputs)})"' if inputs else ""
    return [
        name
        for name, source in sources.items()
        if re.search(rf"^def {function}\(", source, re.MULTILINE)
        and re.search(wanted, source, re.MULTILINE)
    ]


class Methods:
    """The methods of a package.

    Args:
        package: whose files are methods.
        function: what the file of a method defines.
        section: of the recipe, which holds the keys of a method's `Settings`.
    """

    def __init__(self, package: str, function: str, section: str) -> None:
        self.package, self.function, self.section = package, function, section

    def names(self) -> list[str]:
        """Names of all methods."""
        return list(method_names(self.package, self.function))

    def module(self, method: str) -> Any:
        """A method's file. Raises UsageError: unknown method."""
        known = self.names()
        if method not in known:
            raise UsageError(
                f"unknown method '{method}'{did_you_mean(method, known)}",
                f"known: {', '.join(known)}",
            )
        return importlib.import_module(f"{self.package}.{method.replace('-', '_')}")

    def settings(self, method: str, given: Mapping[str, Any]) -> BaseModel:
        """The method's own settings, read from the recipe's section. Raises UsageError: unknown method or key (with the
        nearest known one), or a value of the wrong type."""
        from pydantic import ValidationError

        model: type[BaseModel] = self.module(method).Settings
        try:
            return model.model_validate(dict(given))
        except ValidationError as error:
            known, lines = list(model.model_fields), []
            for problem in error.errors():
                key = ".".join([self.section, *map(str, problem["loc"])])
                if problem["type"] == "extra_forbidden":
                    lines.append(
                        f"unknown key '{key}' of method {method}{did_you_mean(key.split('.')[-1], known)}"
                    )
                else:
                    text = (
                        problem["msg"]
                        .removeprefix("Value error, ")
                        .replace("Input should be", "must be")
                    )
                    lines.append(f"'{key}' {text[0].lower()}{text[1:]}, got {problem['input']!r}")
            allowed = ", ".join(f"{self.section}.{name}" for name in known)
            raise UsageError("\n".join(lines), f"keys of {method}: {allowed}") from None
