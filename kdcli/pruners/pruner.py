"""The interface of a pruning method to the command that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdcli.pruners.masked import Masks, is_score
from kdcli.types import ParamGroup

WEIGHT_LR = 3e-5
"""Learning rate of fine-tuned weights (movement pruning) and of a new head (SMP, table 4)."""


@dataclass(frozen=True)
class Defaults:
    """What a method's authors ran it with, beyond its own settings.

    Attributes:
        lr: the schedule's learning rate.
        teacher: weight of the teacher's term, if there is a teacher; the labels' is the rest.
        head: `embedding`: frozen, made of label words; `scratch`: trained.
        exact: the density can be chosen; else gates or thresholds and the regularizer decide it.
    """

    lr: float
    teacher: float
    head: Literal["embedding", "scratch"] = "scratch"
    exact: bool = True


@dataclass
class Pruner:
    """A method bound to one model and the steps of one run.

    Attributes:
        masks: of the model; they keep everything before the first `after`.
        trains_weights: False: only scores are trained; the caller thaws a new head.
        choose: steps done -> the masks.
        density: steps done -> share of the weights that is kept; None where thresholds and regularizer decide it.
        score_lr, weight_lr: learning rates as factors of the schedule's.
        regularise: steps done -> weighted terms of the loss of the next step.
        contrast: see `kdcli.pruners.cap`; None for methods that compare no states.
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
        """Weighted terms to add to the loss of this step; empty without a regularizer."""
        return {} if self.regularise is None else self.regularise(self.done)

    def param_group(self, name: str) -> ParamGroup:
        """How a parameter is trained; scores are never decayed."""
        return ParamGroup(self.score_lr, decayed=False) if is_score(name) else ParamGroup(self.weight_lr)
