"""One file a method, named as in a recipe with `_` for `-`; it has `Settings`, `DEFAULTS` and `pruner`, and nothing
else has to be told of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError
from transformers import PreTrainedModel

from kdcli.errors import UsageError, did_you_mean
from kdcli.pruners.pruner import Defaults, Pruner

__all__ = ["Pruner", "bind", "check_settings", "defaults", "methods"]


def methods() -> list[str]:
    """Names of the pruning methods there are."""
    names = [m.name for m in pkgutil.iter_modules(__path__)]
    return [n.replace("_", "-") for n in names if hasattr(importlib.import_module(f"{__name__}.{n}"), "Settings")]


def defaults(method: str) -> Defaults:
    """Learning rate and teacher's share of a method's authors.

    Raises:
        UsageError: unknown method.
    """
    found: Defaults = _module(method).DEFAULTS
    return found


def check_settings(method: str, settings: Mapping[str, Any]) -> BaseModel:
    """The method's own settings, read from the recipe's `pruner:` section.

    Raises:
        UsageError: unknown method or key (with the nearest known one), or a value of the wrong type.
    """
    model: type[BaseModel] = _module(method).Settings
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        known, lines = list(model.model_fields), []
        for found in error.errors():
            key = ".".join(["pruner", *map(str, found["loc"])])
            if found["type"] == "extra_forbidden":
                lines.append(f"unknown key '{key}' of method {method}{did_you_mean(key.split('.')[-1], known)}")
            else:
                said = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
                lines.append(f"'{key}' {said[0].lower()}{said[1:]}, got {found['input']!r}")
        raise UsageError("\n".join(lines), f"keys of {method}: {', '.join('pruner.' + k for k in known)}") from None


def bind(
    method: str, settings: Mapping[str, Any], model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put a method's masks on a model, and freeze what it does not train.

    Args:
        model: in the type it is computed in; with its head, which is frozen too where a method trains no weights.
        density: share of the weights that is kept in the end.
        steps, lr: of the plan.

    Raises:
        UsageError: see `check_settings`; a model type without a row in `kdcli.models.layout`; a density that is not
            above 0 and at most 1; settings that do not fit the steps.
    """
    checked = check_settings(method, settings)
    if not 0 < density <= 1:
        raise UsageError(
            f"a sparsity of {1 - density:g} is not possible", "at least 0 and less than 1: 0.9 removes 90 %"
        )
    try:
        bound: Pruner = _module(method).pruner(checked, model, density=density, steps=steps, lr=lr)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return bound


def _module(method: str) -> ModuleType:
    if method not in methods():
        raise UsageError(
            f"unknown method '{method}'{did_you_mean(method, methods())}", f"known: {', '.join(methods())}"
        )
    return importlib.import_module(f"{__name__}.{method.replace('-', '_')}")
