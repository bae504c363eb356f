"""What `kdcli.losses` and `kdcli.pruners` have in common: a file a method, and a section of the recipe for its keys."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from kdcli.errors import UsageError, did_you_mean


class Methods:
    """The methods of a package.

    Args:
        package: whose files are methods; a file's name, with `-` for `_`, is the method's.
        function: what a file defines that is one; others are not.
        section: of the recipe, where the keys of a method's `Settings` stand.
    """

    def __init__(self, package: str, function: str, section: str) -> None:
        self.package, self.function, self.section = package, function, section

    def names(self) -> list[str]:
        """Names of the methods there are."""
        files = [m.name for m in pkgutil.iter_modules(importlib.import_module(self.package).__path__)]
        return [n.replace("_", "-") for n in files if hasattr(self._file(n), self.function)]

    def module(self, method: str) -> Any:
        """A method's file.

        Raises:
            UsageError: unknown method.
        """
        known = self.names()
        if method not in known:
            raise UsageError(f"unknown method '{method}'{did_you_mean(method, known)}", f"known: {', '.join(known)}")
        return self._file(method.replace("-", "_"))

    def settings(self, method: str, given: Mapping[str, Any]) -> BaseModel:
        """The method's own settings, read from the recipe's section.

        Raises:
            UsageError: unknown method or key (with the nearest known one), or a value of the wrong type.
        """
        model: type[BaseModel] = self.module(method).Settings
        try:
            return model.model_validate(dict(given))
        except ValidationError as error:
            known, lines = list(model.model_fields), []
            for found in error.errors():
                key = ".".join([self.section, *map(str, found["loc"])])
                if found["type"] == "extra_forbidden":
                    lines.append(f"unknown key '{key}' of method {method}{did_you_mean(key.split('.')[-1], known)}")
                else:
                    said = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
                    lines.append(f"'{key}' {said[0].lower()}{said[1:]}, got {found['input']!r}")
            allowed = ", ".join(f"{self.section}.{name}" for name in known)
            raise UsageError("\n".join(lines), f"keys of {method}: {allowed}") from None

    def _file(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")
