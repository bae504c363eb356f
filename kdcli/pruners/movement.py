"""Movement pruning (Sanh et al. 2020, https://arxiv.org/abs/2005.07683): keeps weights that move away from zero.

    W' = W ⊙ Top_v(S)                                   §4
    ∂L/∂S = W ⊙ ∂L/∂W',  so that S ← −α Σ ∂L/∂W' · W    eq. 4, 5; S = 0 at first, AdamW at its own rate
    ∂L/∂W = M ⊙ ∂L/∂W'                                  the weights are fine-tuned too

Density falls along a cubic: 1 for the first `initial_fraction` of the steps, final for the last `final_fraction` (§5).
The schedule's learning rate is that of the weights.

Relations: trains the weights, unlike `smp`, and needs more steps: runs of 1,000 fell to chance at a density of 10 %
(docs/results.md). `soft-movement` lets each matrix find its density; `cap` adds contrast with two teachers.

    method: movement
    pruner: {masking: local, final_fraction: 0.2}
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners.masked import attach
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, Shape, kept_share, ramp
from kdcli.pruners.selection import select
from kdcli.recipe.sections import Section

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9)


class Ramp(Section):
    """Settings of every method that trains the weights too and prunes along a ramp."""

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
        """Share of the ramp that is past."""
        return ramp(done, steps, first=self.initial_fraction, last=self.final_fraction)

    def density(self, done: int, steps: int, final: float) -> float:
        """Share of the weights that is kept."""
        return kept_share(self.passed(done, steps), final, self.schedule)


class Settings(Ramp):
    """Keys of the recipe's `pruner:` section under `method: movement`."""

    masking: Literal["local", "global", "proportional"] = "local"
    temperature: float = Field(1.0, gt=0)
    score_lr: float = Field(1e-2, gt=0)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model; arguments as in `kdcli.pruners.smp`, but `lr` is the weights'."""
    masks = attach(model, embeddings=settings.embeddings)
    density_at = partial(settings.density, steps=steps, final=density)

    def choose(done: int) -> dict[str, Tensor]:
        return select(
            settings.masking, masks.scores(), masks.kinds, density_at(done), settings.temperature
        )

    return Pruner(
        masks,
        trains_weights=True,
        choose=choose,
        density=density_at,
        score_lr=settings.score_lr / lr,
    )
