"""One file a paper. A file's name is the method's name in a recipe; it has `Settings` and `objective`, and nothing else
has to be told of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from kdcli.errors import UsageError, did_you_mean
from kdcli.types import ModelShape, Objective


def methods() -> list[str]:
    """Names of the distillation methods there are."""
    names = [m.name for m in pkgutil.iter_modules(__path__)]
    return [n for n in names if hasattr(importlib.import_module(f"{__name__}.{n}"), "objective")]


def check_settings(method: str, settings: Mapping[str, Any]) -> BaseModel:
    """The method's own settings, read from the recipe's `loss:` section.

    Raises:
        UsageError: unknown method or key (with the nearest known one), or a value of the wrong type.
    """
    if method not in methods():
        raise UsageError(
            f"unknown method '{method}'{did_you_mean(method, methods())}", f"known: {', '.join(methods())}"
        )
    model: type[BaseModel] = importlib.import_module(f"{__name__}.{method}").Settings
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        known, lines = list(model.model_fields), []
        for found in error.errors():
            key = ".".join(map(str, found["loc"]))
            if found["type"] == "extra_forbidden":
                lines.append(f"unknown key 'loss.{key}' of method {method}{did_you_mean(key, known)}")
            else:
                said = found["msg"].replace("Input should be", "must be")
                lines.append(f"'loss.{key}' {said[0].lower()}{said[1:]}, got {found['input']!r}")
        raise UsageError("\n".join(lines), f"keys of {method}: {', '.join('loss.' + k for k in known)}") from None


def bind(method: str, settings: Mapping[str, Any], teacher: ModelShape, student: ModelShape) -> Objective:
    """The objective of a method for one teacher and one student.

    Raises:
        UsageError: see `check_settings`; or the method cannot compare these two shapes.
    """
    checked = check_settings(method, settings)
    try:
        bound: Objective = importlib.import_module(f"{__name__}.{method}").objective(checked, teacher, student)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return bound
