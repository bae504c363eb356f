"""L0 regularisation with hard concrete gates (Louizos et al. 2018, https://arxiv.org/abs/1712.01312).

    u ~ U(0, 1),  s = σ((log u − log(1 − u) + S) / β),  z = min(1, max(0, s(ζ − γ) + γ))      eq. 10
    W' = W ⊙ z
    L = L_task + λ · mean over matrices of mean σ(S − β log(−γ/ζ))                            eq. 12
    in evaluation  z = min(1, max(0, σ(S)(ζ − γ) + γ))                                        eq. 13

with S for log α, β = 2/3, γ = −0.1, ζ = 1.1. The gradient goes through z, not straight through. W ⊙ z is folded, and
the mask is z > 0. λ decides the density; λ and rates are those of movement pruning's baseline (Sanh et al. 2020).

Relations: the baseline with random gates. `soft-movement` has a threshold in their place, `movement` an exact density.
λ belongs to a number of steps: in 1,000 the default removes nearly everything.

    method: l0
    pruner: {regularizer: 125, score_lr: 0.1}
"""

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners.masked import MaskedWeight, attach
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner
from kdcli.recipe.sections import Section

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9, exact=False)

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
EDGE = 1e-6  # Distance of the noise from 0 and 1, where its logit is infinite


class Settings(Section):
    """Keys of the recipe's `pruner:` section under `method: l0`."""

    regularizer: float = Field(125.0, ge=0)
    start: float = 2.197
    score_lr: float = Field(1e-1, gt=0)
    embeddings: Literal["frozen", "trained"] = "frozen"


class Gate(MaskedWeight):
    """A weight times its gate, drawn anew in each forward pass of training."""

    def forward(self, weight: Tensor) -> Tensor:
        """The gated weight, in the weight's dtype."""
        score: Any = self.score
        if self.training:
            u = torch.rand_like(score).clamp_(EDGE, 1 - EDGE)
            score = (u.logit() + score) / BETA
        return weight * gates(score).to(weight.dtype)


def gates(score: Tensor) -> Tensor:
    """σ(S), stretched and clamped to 0 ... 1."""
    return (score.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put gates on a model; arguments as in `kdcli.pruners.movement`, of which `density` and `steps` are not used."""
    masks = attach(model, start=settings.start, embeddings=settings.embeddings, kind=Gate)

    def choose(done: int) -> dict[str, Tensor]:
        # Only for reports and folding: the gates themselves remove the weights, and may empty a matrix.
        return {name: gates(score) > 0 for name, score in masks.scores().items()}

    def regularise(done: int) -> dict[str, Tensor]:
        return {
            "regularizer": settings.regularizer * masks.mean_sigmoid(BETA * math.log(-GAMMA / ZETA))
        }

    score_lr, term = settings.score_lr / lr, regularise if settings.regularizer else None
    return Pruner(
        masks, trains_weights=True, choose=choose, density=None, score_lr=score_lr, regularise=term
    )
