"""What every pruning method is to the command that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdcli.models.layout import layout_for
from kdcli.pruners.masked import Masks, is_score
from kdcli.types import ParamGroup

WEIGHT_LR = 3e-5
"""Learning rate of what is not scores: fine-tuned weights (movement pruning), a head begun at random (SMP, table 4)."""


@dataclass(frozen=True)
class Defaults:
    """What a method's authors ran it with, beyond its own settings.

    Attributes:
        lr: the plan's learning rate.
        teacher: share of the teacher's term in the loss where there is a teacher; the labels' is the rest.
        head: frozen, of label words (`embedding`), or trained (`scratch`).
        exact: a density can be asked for; else gates or thresholds and the regulariser decide it.
    """

    lr: float
    teacher: float
    head: Literal["embedding", "scratch"] = "scratch"
    exact: bool = True


@dataclass
class Pruner:
    """A method bound to one model and the steps of one run.

    Attributes:
        masks: of the model, all of it kept before the first `after`.
        trains_weights: False: every parameter but the scores is frozen; a new head has to be thawed by who made it.
        choose: steps done → the masks.
        density: steps done → share of the weights that is kept; None where thresholds and regulariser decide that.
        score_lr, weight_lr: learning rates in terms of the plan's.
        regularise: steps done → weighted terms of the loss of the next step.
        contrast: see `kdcli.pruners.cap`; None for methods that look at no states.
        done: steps done.
    """

    masks: Masks
    trains_weights: bool
    choose: Callable[[int], dict[str, Tensor]]
    density: Callable[[int], float] | None
    score_lr: float = 1.0
    weight_lr: float = 1.0
    regularise: Callable[[int], dict[str, Tensor]] | None = None
    contrast: Callable[[Tensor, Mapping[str, Tensor], Tensor | None], dict[str, Tensor]] | None = None
    done: int = 0

    @torch.no_grad()
    def after(self, done: int) -> None:
        """Choose the masks that hold until the next call: a function of `done`, the weights and the scores."""
        self.done = done
        self.masks.set(self.choose(done))

    def terms(self) -> dict[str, Tensor]:
        """Weighted terms to add to the loss of this step; empty without a regulariser."""
        return {} if self.regularise is None else self.regularise(self.done)

    def pace(self, name: str) -> ParamGroup:
        """How a parameter is trained; scores are never decayed."""
        return ParamGroup(self.score_lr, decayed=False) if is_score(name) else ParamGroup(self.weight_lr)


def freeze_embeddings(masks: Masks) -> None:
    """Train no embeddings, as the authors of movement pruning, on whose code its baselines were measured."""
    base = masks.model.base_model
    prefixes = layout_for(masks.model.config).embeddings
    for name, parameter in base.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
