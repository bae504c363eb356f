"""One file a paper. A file's name, with `-` for `_`, is the method's name in a recipe; nothing else has to be told.

It has `Settings`, `objective` and

* `READS`: what it can learn from: `text`, `masked` (text of which some tokens are masked, through masked language
  models), `task` (labelled examples);
* where it reads tasks, `STAGE`: `separate` (trained before the prediction stage) or `joint` (added to its loss), and
  `KD`: the keys of the recipe's `kd:` section with which its authors ran that stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdcli.errors import UsageError
from kdcli.recipe.methods import Methods
from kdcli.types import ModelShape, Objective

_METHODS = Methods(__name__, "objective", "loss")
methods, check_settings = _METHODS.names, _METHODS.settings


def inputs(method: str) -> frozenset[str]:
    """What a method can learn from, see above.

    Raises:
        UsageError: unknown method.
    """
    found: frozenset[str] = _METHODS.module(method).INPUTS
    return found


def on_tasks(method: str) -> tuple[str, dict[str, float]]:
    """How a method's authors used it on a task: its `STAGE` and `KD`, see above.

    Raises:
        UsageError: unknown method, or one that reads no tasks.
    """
    if "task" not in inputs(method):
        fitting = ", ".join(m for m in methods() if "task" in inputs(m))
        raise UsageError(f"method {method} learns from text, not from a task's examples", f"on tasks: {fitting}")
    module = _METHODS.module(method)
    return module.STAGE, module.KD


def build_objective(method: str, settings: Mapping[str, Any], teacher: ModelShape, student: ModelShape) -> Objective:
    """The objective of a method for one teacher and one student.

    Raises:
        UsageError: see `check_settings`; or the method cannot compare these two shapes.
    """
    checked = check_settings(method, settings)
    try:
        bound: Objective = _METHODS.module(method).objective(checked, teacher, student)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return bound
