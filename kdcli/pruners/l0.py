"""L0 regularisation with hard concrete gates.

Louizos et al. 2018, https://arxiv.org/abs/1712.01312:

    u ~ U(0, 1),  s = σ((log u − log(1 − u) + S) / β),  z = min(1, max(0, s(ζ − γ) + γ))      eq. 10
    W' = W ⊙ z
    L = L_task + λ · mean over matrices of mean σ(S − β log(−γ/ζ))                            eq. 12
    in evaluation  z = min(1, max(0, σ(S)(ζ − γ) + γ))                                        eq. 13

S stands for log α, β = 2/3, γ = −0.1 and ζ = 1.1. The gradient passes through z instead of straight
through a mask. W ⊙ z is folded into the weights, and the mask is z > 0. λ decides the density. λ
and the learning rates come from the baseline in the paper on movement pruning (Sanh et al. 2020).

When to use: as the baseline with random gates. Prefer `soft-movement` for a threshold instead of
gates, and `movement` for an exact density. λ depends on the number of steps: in 1,000 steps, the
default removes nearly everything.

    method: l0
    pruner: {regularizer: 125, score_lr: 0.1}
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners.masked import MaskedWeight, attach
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner
from kdcli.recipe.sections import Section
from kdcli.types import REGULARIZER

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9, exact=False)

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
EDGE = 1e-6  # minimum distance of the noise from 0 and 1, where its logit is infinite


class Settings(Section):
    """Keys of the recipe's `pruner:` section under `method: l0`. `start` is S before training."""

    regularizer: float = Field(125.0, ge=0)
    start: float = 2.197
    score_lr: float = Field(1e-1, gt=0)
    embeddings: Literal["frozen", "trained"] = "frozen"


class Gate(MaskedWeight):
    """A weight times its gate, which is sampled in each forward pass of training."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return the gated weight [out, in], in the weight's dtype."""
        score: Tensor | None = self.score
        assert score is not None, "gates need scores"
        if self.training:
            u = torch.rand_like(score).clamp_(EDGE, 1 - EDGE)
            score = (u.logit() + score) / BETA
        return weight * hard_concrete_gates(score).to(weight.dtype)


def hard_concrete_gates(score: Tensor) -> Tensor:
    """Return the gates z in evaluation (eq. 13): σ(S), stretched and clamped to [0, 1]."""
    return (score.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put gates on a model.

    Args:
        settings: The recipe's settings.
        model: The model, which is changed in place.
        density: Not used, because the regularizer decides the density.
        steps: Not used.
        lr: The schedule's learning rate, which applies to the weights.

    Raises UsageError if the model type is unknown.
    """
    masks = attach(model, start=settings.start, embeddings=settings.embeddings, kind=Gate)

    def choose(done: int) -> dict[str, Tensor]:
        # These masks serve reports and folding only. The gates remove the weights, and may remove
        # all weights of a matrix.
        return {name: hard_concrete_gates(score) > 0 for name, score in masks.scores().items()}

    shift = BETA * math.log(-GAMMA / ZETA)

    def regularise(done: int) -> dict[str, Tensor]:
        return {REGULARIZER: settings.regularizer * masks.mean_sigmoid(shift)}

    return Pruner(
        masks,
        trains_weights=True,
        choose=choose,
        density=None,
        score_lr=settings.score_lr / lr,
        regularise=regularise if settings.regularizer else None,
    )
