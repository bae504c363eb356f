"""One file a method, named as in a recipe with `_` for `-`; it has `Settings`, `DEFAULTS` and `pruner`, and nothing
else has to be told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.pruners.pruner import Defaults, Pruner
from kdcli.recipe.methods import Methods

__all__ = ["Pruner", "bind", "check_settings", "defaults", "methods"]

_METHODS = Methods(__name__, "pruner", "pruner")
methods, check_settings = _METHODS.names, _METHODS.settings


def defaults(method: str) -> Defaults:
    """What a method's authors ran it with.

    Raises:
        UsageError: unknown method.
    """
    found: Defaults = _METHODS.module(method).DEFAULTS
    return found


def build_pruner(
    method: str, settings: Mapping[str, Any], model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put a method's masks on a model, and freeze what it does not train.

    Args:
        model: in the type it is computed in; with its head, which is frozen too where a method trains no weights.
        density: share of the weights that is kept in the end.
        steps, lr: of the plan.

    Raises:
        UsageError: see `Methods.settings`; a model type without a row in `kdcli.models.layout`; a density that is not
            above 0 and at most 1; settings that do not fit the steps.
    """
    checked = check_settings(method, settings)
    if not 0 < density <= 1:
        raise UsageError(
            f"a sparsity of {1 - density:g} is not possible", "at least 0 and less than 1: 0.9 removes 90 %"
        )
    try:
        bound: Pruner = _METHODS.module(method).pruner(checked, model, density=density, steps=steps, lr=lr)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return bound
