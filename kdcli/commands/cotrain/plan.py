"""What a co-training is of: the names of both models, what they learn from, where it lies, what it is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdcli.commands.cotrain.settings import CotrainRecipe, CotrainTaskRecipe
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT, TEACHER, Weights
from kdcli.recipe.resolve import Resolved

ROLES = (TEACHER, STUDENT)

PARTNERS = ("student-1", "student-2")
"""What the two models are called beside a frozen teacher, where neither is one."""


def names_of(recipe: CotrainRecipe | CotrainTaskRecipe) -> dict[str, str]:
    """Role → name in logs, reports and directories."""
    community = isinstance(recipe, CotrainRecipe) and recipe.community.model is not None
    return dict(zip(ROLES, PARTNERS if community else ROLES, strict=True))


def weights_of(recipe: CotrainRecipe | CotrainTaskRecipe) -> Weights:
    """What the recipe says each model learns from.

    Raises:
        UsageError: see `Weights.of`.
    """
    community = isinstance(recipe, CotrainRecipe) and recipe.community.model is not None
    return Weights.of(recipe.weights, recipe.mode, community=community)


STANDALONE = "standalone"
"""Directory of the run without each other, and what its models are called after their own name."""


def check_pair(recipe: CotrainRecipe | CotrainTaskRecipe) -> None:
    """Check what needs no model and no data.

    Raises:
        UsageError: a model that is not given, or weights that say nothing.
    """
    for role in (TEACHER, STUDENT):
        if getattr(recipe, role) is None:
            raise UsageError(
                f"no {role} given",
                "kdcli cotrain TEACHER STUDENT; each is a shape such as 6x768, a hub id or directory",
            )
    weights_of(recipe)


def name_of(recipe: CotrainRecipe | CotrainTaskRecipe) -> str:
    """The directory of a run without `-o`: cotrain-TEACHER-STUDENT, and the task."""
    models = [Path(str(source)).name.replace(":", "_") for source in (recipe.teacher, recipe.student)]
    on = [str(recipe.task)] if isinstance(recipe, CotrainTaskRecipe) else []
    return "-".join(["cotrain", *models, *on])


def standalone(resolved: Resolved[Any]) -> Resolved[Any]:
    """The recipe of the run to compare with: the same without anything that one model learns from the other."""
    recipe = resolved.recipe.model_copy(update={"mode": STANDALONE, "standalone": False})
    return Resolved(recipe, dict(resolved.origins) | dict.fromkeys(("mode", "standalone"), "to compare with"))


def due_alone(recipe: CotrainRecipe | CotrainTaskRecipe) -> bool:
    """Whether there is a run without each other to compare with."""
    weights = weights_of(recipe)
    return recipe.standalone and weights.mutual and weights.teacher_hard + weights.student_hard > 0
