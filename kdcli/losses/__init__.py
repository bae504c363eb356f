"""Distillation losses, one file per paper; a file's name, with `-` for `_`, is the method's name in a recipe.

A method's file defines, and nothing else has to be registered:

* `Settings`: keys of the recipe's `loss:` section; unknown keys are errors.
* `objective(settings, teacher, student)`: the loss for two shapes, a `kdcli.types.Objective`. A ValueError says why the
  two cannot be compared.
* `OVER`: what each of its terms is a mean over, so that no term depends on the size of micro-batches.
* `INPUTS`: what it learns from: `text`, `masked` (text with masked tokens, through masked language models), `task`
  (labelled examples).
* with `task`: `STAGE`, `separate` (before the prediction stage) or `joint` (added to its loss), and `KD`, the `kd:`
  settings with which its authors ran that stage.

In all of them no gradient reaches the teacher and padding counts nothing; tests/losses checks every file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kdcli.errors import UsageError
from kdcli.losses.relation import computed_by
from kdcli.recipe.methods import Methods
from kdcli.types import ModelShape, Objective, Signals

_METHODS = Methods(__name__, "objective", "loss")
methods, check_settings = _METHODS.names, _METHODS.settings


def inputs(method: str) -> frozenset[str]:
    """What a method learns from; UsageError if there is no such method."""
    kinds: frozenset[str] = _METHODS.module(method).INPUTS
    return kinds


def masks_text(method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a method reads masked text: always, or because `masked_lm_weight` in its settings adds that loss. Raises
    UsageError: see `check_settings`."""
    checked: Any = check_settings(method, settings)
    return "masked" in inputs(method) or getattr(checked, "masked_lm_weight", 0.0) > 0


def on_tasks(method: str) -> tuple[str, dict[str, float]]:
    """`STAGE` and `KD` of a method; UsageError if there is no such method or it does not learn from tasks."""
    if "task" not in inputs(method):
        others = ", ".join(m for m in methods() if "task" in inputs(m))
        raise UsageError(
            f"method {method} learns from text, not from a task's examples", f"on tasks: {others}"
        )
    module = _METHODS.module(method)
    return module.STAGE, module.KD


def build_objective(
    method: str,
    settings: Mapping[str, Any],
    teacher: ModelShape,
    student: ModelShape,
    *,
    kernel: str = "torch",
) -> Objective:
    """A method's objective, its relations by a `kdcli.losses.relation.KERNEL`. Raises UsageError: its settings are
    wrong, or it cannot compare these two shapes."""
    checked = check_settings(method, settings)
    try:
        objective: Objective = _METHODS.module(method).objective(checked, teacher, student)
    except ValueError as error:
        raise UsageError(str(error)) from None

    def terms(teacher: Signals, student: Signals) -> Mapping[str, Any]:
        with computed_by(kernel):
            return objective.terms(teacher, student)

    return replace(objective, terms=terms)
