"""Movement pruning (Sanh et al. 2020, https://arxiv.org/abs/2005.07683): kept is what moves away from zero.

    W' = W ⊙ Top_v(S)                                   §4
    ∂L/∂S = W ⊙ ∂L/∂W',  so that S ← −α Σ ∂L/∂W' · W    eq. 4, 5; S = 0 at first, AdamW at its own rate
    ∂L/∂W = M ⊙ ∂L/∂W'                                  the weights are fine-tuned too

Density falls along a cubic, held at 1 for the first `initial_fraction` of the steps and at the end's for the last
`final_fraction` (§5; SQuAD: 1 and 2 of 10 epochs). The plan's rate is that of the weights.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners import schedule
from kdcli.pruners.masked import attach
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, freeze_embeddings
from kdcli.pruners.schedule import Shape
from kdcli.pruners.selection import select

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9)


class Ramp(BaseModel):
    """Settings of every method that trains the weights too."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schedule: Shape = "cubic"
    initial_fraction: float = Field(0.1, ge=0, le=1)
    final_fraction: float = Field(0.2, ge=0, le=1)
    embeddings: Literal["frozen", "trained"] = "frozen"

    @model_validator(mode="after")
    def _leaves_a_ramp(self) -> Ramp:
        if self.initial_fraction + self.final_fraction > 1:
            raise ValueError("initial_fraction and final_fraction must not be more than 1 together")
        return self

    def passed(self, done: int, steps: int) -> float:
        """Share of the ramp that lies behind."""
        return schedule.ramp(done, steps, first=self.initial_fraction, last=self.final_fraction)


class Settings(Ramp):
    """Keys of the recipe's `pruner:` section under `method: movement`."""

    masking: Literal["local", "global", "proportional"] = "local"
    temperature: float = Field(1.0, gt=0)
    score_lr: float = Field(1e-2, gt=0)


def pruner(settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float) -> Pruner:
    """Put masks on a model; arguments as in `kdcli.pruners.smp`, but `lr` is the weights'."""
    masks = attach(model)
    if settings.embeddings == "frozen":
        freeze_embeddings(masks)

    def density_at(done: int) -> float:
        return schedule.density(settings.passed(done, steps), density, settings.schedule)

    def choose(done: int) -> dict[str, Tensor]:
        return select(settings.masking, masks.scores(), masks.kinds, density_at(done), settings.temperature)

    return Pruner(masks, trains_weights=True, choose=choose, density=density_at, score_lr=settings.score_lr / lr)
