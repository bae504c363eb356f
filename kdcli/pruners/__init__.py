"""Pruning methods: one file a method, named as in a recipe with `_` for `-`: `Settings`, `DEFAULTS` and `pruner`.

Which one: `smp` keeps the weights and saves a mask of a few bits a weight, so many tasks share one model. The others
train the weights too, and save one whole model a task.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.pruners.pruner import Defaults, Pruner
from kdcli.recipe.methods import Methods

__all__ = ["Pruner", "build_pruner", "check_settings", "defaults", "methods"]

_METHODS = Methods(__name__, "pruner", "pruner")
methods, check_settings = _METHODS.names, _METHODS.settings


def defaults(method: str) -> Defaults:
    """What a method's authors ran it with; an unknown method is a UsageError."""
    values: Defaults = _METHODS.module(method).DEFAULTS
    return values


def build_pruner(
    method: str,
    settings: Mapping[str, Any],
    model: PreTrainedModel,
    *,
    density: float,
    steps: int,
    lr: float,
) -> Pruner:
    """Put a method's masks on a model, and freeze what it does not train: all but scores where it trains no weights.
    `density`: share of the weights that is kept in the end, above 0 and at most 1. `steps`, `lr`: of the schedule.
    Raises UsageError: see `Methods.settings`; an unknown model type; a density or settings that do not fit."""
    checked = check_settings(method, settings)
    if not 0 < density <= 1:
        hint = "at least 0 and less than 1: 0.9 removes 90 %"
        raise UsageError(f"a sparsity of {1 - density:g} is not possible", hint)
    try:
        built: Pruner = _METHODS.module(method).pruner(
            checked, model, density=density, steps=steps, lr=lr
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    return built
