"""Pruning methods, one file per method.

A method's name in a recipe is its file's name, with `-` for `_`. Its file defines `Settings`,
`DEFAULTS` and `pruner`.

When to use: `smp` keeps the weights and saves a mask of a few bits per weight, so that many tasks
share one model. Prefer another method to train the weights too, and save a whole model per task.
"""

from collections.abc import Mapping

from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.pruners.pruner import Defaults, Pruner
from kdcli.recipe.methods import Methods

__all__ = ["Pruner", "build_pruner", "check_settings", "defaults", "methods"]

_METHODS = Methods(__name__, "pruner", "pruner")
methods, check_settings = _METHODS.names, _METHODS.settings


def defaults(method: str) -> Defaults:
    """Return the values that a method's authors used.

    Raises UsageError if the method does not exist.
    """
    values: Defaults = _METHODS.module(method).DEFAULTS
    return values


def build_pruner(
    method: str,
    settings: Mapping[str, object],
    model: PreTrainedModel,
    *,
    density: float,
    steps: int,
    lr: float,
) -> Pruner:
    """Put a method's masks on a model, and freeze the parameters that the method does not train.

    Args:
        method: The method's name.
        settings: The recipe's `pruner:` section.
        model: The model, which is changed in place.
        density: Share of the weights that the final masks keep, above 0 and at most 1.
        steps: Number of steps of the run.
        lr: The schedule's learning rate.

    Raises UsageError if the method does not exist, the settings are invalid, the model type is
    unknown, the density is not possible, or the settings do not fit the model.
    """
    checked = check_settings(method, settings)
    if not 0 < density <= 1:
        hint = "give at least 0 and less than 1: 0.9 removes 90 %"
        raise UsageError(f"a sparsity of {1 - density:g} is not possible", hint)
    build = _METHODS.module(method).pruner
    try:
        pruner: Pruner = build(checked, model, density=density, steps=steps, lr=lr)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return pruner
