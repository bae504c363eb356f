"""L0 regularisation with hard concrete gates (Louizos et al. 2018, https://arxiv.org/abs/1712.01312).

    u ~ U(0, 1),  s = σ((log u − log(1 − u) + S) / β),  z = min(1, max(0, s(ζ − γ) + γ))      eq. 10
    W' = W ⊙ z
    L = L_task + λ · mean over matrices of mean σ(S − β log(−γ/ζ))                            eq. 12
    in evaluation  z = min(1, max(0, σ(S)(ζ − γ) + γ))                                        eq. 13

with S for log α, β = 2/3, γ = −0.1, ζ = 1.1. The gradient goes through z, not straight through. Gates of a kept weight
may be below 1: what is folded is W ⊙ z, and the mask says where z > 0. λ decides how much is left; λ and rates are
those of the baseline in movement pruning (Sanh et al. 2020, https://arxiv.org/abs/2005.07683).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners.masked import MaskedWeight, attach
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, freeze_embeddings

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9, exact=False)

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
EDGE = 1e-6
"""How near the noise may come to 0 and 1, whose logarithms are infinite."""


class Settings(BaseModel):
    """Keys of the recipe's `pruner:` section under `method: l0`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    regularizer: float = Field(125.0, ge=0)
    start: float = 2.197
    score_lr: float = Field(1e-1, gt=0)
    embeddings: Literal["frozen", "trained"] = "frozen"


class Gate(MaskedWeight):
    """A weight times its gate, drawn anew in each forward pass of training."""

    def forward(self, weight: Tensor) -> Tensor:
        """The gated weight, in the weight's type."""
        score: Any = self.score
        if self.training:
            u = torch.rand_like(score).clamp_(EDGE, 1 - EDGE)
            score = (u.logit() + score) / BETA
        return weight * gates(score).to(weight.dtype)


def gates(score: Tensor) -> Tensor:
    """σ(S), stretched and cut to 0 … 1."""
    return (score.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def pruner(settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float) -> Pruner:
    """Put gates on a model; arguments as in `kdcli.pruners.movement`, of which `density` and `steps` are not used."""
    masks = attach(model, start=settings.start, kind=Gate)
    if settings.embeddings == "frozen":
        freeze_embeddings(masks)

    def choose(done: int) -> dict[str, Tensor]:
        # The gates decide; a matrix whose gates are all closed is empty, whatever the mask would say.
        return {name: gates(score) > 0 for name, score in masks.scores().items()}

    def regularise(done: int) -> dict[str, Tensor]:
        return {"regularizer": settings.regularizer * masks.mean_sigmoid(BETA * math.log(-GAMMA / ZETA))}

    return Pruner(
        masks,
        trains_weights=True,
        choose=choose,
        density=None,
        score_lr=settings.score_lr / lr,
        regularise=regularise if settings.regularizer else None,
    )
