"""One file a paper. A file's name, with `-` for `_`, is the method's name in a recipe; nothing else has to be told.

It has `Settings`, `objective` and

* `READS`: what it can learn from: `text`, `masked` (text of which some tokens are masked, through masked language
  models), `task` (labelled examples);
* where it reads tasks, `STAGE`: `separate` (trained before the prediction stage) or `joint` (added to its loss), and
  `KD`: the keys of the recipe's `kd:` section with which its authors ran that stage.
"""

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
    return [n.replace("_", "-") for n in names if hasattr(importlib.import_module(f"{__name__}.{n}"), "objective")]


def _module(method: str) -> Any:
    return importlib.import_module(f"{__name__}.{method.replace('-', '_')}")


def reads(method: str) -> frozenset[str]:
    """What a method can learn from, see above.

    Raises:
        UsageError: unknown method.
    """
    _check_method(method)
    found: frozenset[str] = _module(method).READS
    return found


def on_tasks(method: str) -> tuple[str, dict[str, float]]:
    """How a method's authors used it on a task: its `STAGE` and `KD`, see above.

    Raises:
        UsageError: unknown method, or one that reads no tasks.
    """
    if "task" not in reads(method):
        fitting = ", ".join(m for m in methods() if "task" in reads(m))
        raise UsageError(f"method {method} learns from text, not from a task's examples", f"on tasks: {fitting}")
    module = _module(method)
    return module.STAGE, module.KD


def _check_method(method: str) -> None:
    if method not in methods():
        raise UsageError(
            f"unknown method '{method}'{did_you_mean(method, methods())}", f"known: {', '.join(methods())}"
        )


def check_settings(method: str, settings: Mapping[str, Any]) -> BaseModel:
    """The method's own settings, read from the recipe's `loss:` section.

    Raises:
        UsageError: unknown method or key (with the nearest known one), or a value of the wrong type.
    """
    _check_method(method)
    model: type[BaseModel] = _module(method).Settings
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
        bound: Objective = _module(method).objective(checked, teacher, student)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return bound
