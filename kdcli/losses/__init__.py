"""Distillation losses, one file per paper.

A method's name in a recipe is its file's name, with `-` for `_`. Its file defines the following
names, and nothing has to be registered elsewhere:

* `Settings`: the keys of the recipe's `loss:` section. Unknown keys are errors.
* `objective(settings, teacher, student)`: the loss for two shapes, as a `kdcli.types.Objective`. It
  raises a ValueError that explains why two shapes cannot be compared.
* `OVER`: what each term is a mean over, so that no term depends on the size of the micro-batches.
* `INPUTS`: what the method learns from: `text`, `masked` (text with masked tokens, read by masked
  language models), `task` (labelled examples) or `sentences` (texts for embedding models).
* `STAGE`, for methods that learn from a `task`: `separate` runs before the prediction stage, and
  `joint` is added to the prediction stage's loss.
* `KD`, for the same methods: the `kd:` settings that the authors used for the prediction stage.

In every method, no gradient reaches the teacher and padding does not contribute. tests/losses
checks every file.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from kdcli.errors import UsageError
from kdcli.losses.relation import computed_by
from kdcli.recipe.methods import Methods
from kdcli.types import ModelShape, Objective, Signals

_METHODS = Methods(__name__, "objective", "loss")
methods, check_settings = _METHODS.names, _METHODS.settings


def inputs_of(method: str) -> frozenset[str]:
    """Return what a method learns from, as in its `INPUTS`.

    Raises UsageError if the method does not exist.
    """
    kinds: frozenset[str] = _METHODS.module(method).INPUTS
    return kinds


def masks_text(method: str, settings: Mapping[str, object]) -> bool:
    """Return whether a method reads masked text.

    It does if it always reads masked text, or if `masked_lm_weight` in its settings adds masked
    language modelling. Raises UsageError if the settings are invalid.
    """
    checked = check_settings(method, settings)
    return "masked" in inputs_of(method) or getattr(checked, "masked_lm_weight", 0.0) > 0


def on_tasks(method: str) -> tuple[str, dict[str, float]]:
    """Return a method's `STAGE` and `KD`.

    Raises UsageError if the method does not exist, or does not learn from tasks.
    """
    if "task" not in inputs_of(method):
        others = ", ".join(m for m in methods() if "task" in inputs_of(m))
        raise UsageError(
            f"method {method} learns from text, not from a task's examples",
            f"methods for tasks: {others}",
        )
    module = _METHODS.module(method)
    return module.STAGE, module.KD


def build_objective(
    method: str,
    settings: Mapping[str, object],
    teacher: ModelShape,
    student: ModelShape,
    *,
    kernel: str = "torch",
) -> Objective:
    """Build a method's objective for two shapes.

    Args:
        method: The method's name.
        settings: The recipe's `loss:` section.
        teacher, student: The shapes of the two models.
        kernel: How relations are computed; see `kdcli.losses.relation.KERNEL`.

    Raises UsageError if the method does not exist, the settings are invalid, or the method cannot
    compare the two shapes.
    """
    checked = check_settings(method, settings)
    try:
        objective: Objective = _METHODS.module(method).objective(checked, teacher, student)
    except ValueError as error:
        raise UsageError(str(error)) from None

    def terms(teacher: Signals, student: Signals) -> Mapping[str, Tensor]:
        with computed_by(kernel):
            return objective.terms(teacher, student)

    return replace(objective, terms=terms)
