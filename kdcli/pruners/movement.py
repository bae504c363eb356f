"""Movement pruning: keep the weights that move away from zero.

Sanh et al. 2020, https://arxiv.org/abs/2005.07683:

    W' = W ⊙ Top_v(S)                                   §4
    ∂L/∂S = W ⊙ ∂L/∂W',  so that S ← −α Σ ∂L/∂W' · W    eq. 4, 5
    ∂L/∂W = M ⊙ ∂L/∂W'                                  the weights are fine-tuned too

S starts at 0, and AdamW trains it at its own learning rate. The density falls along a cubic:
it is 1 during the first `initial_fraction` of the steps, and has its final value during the last
`final_fraction` (§5). The schedule's learning rate applies to the weights.

When to use: the weights may change and there is time for many steps; runs of 1,000 steps fell to
chance at a density of 10 % (docs/evidence/pruning.md). Prefer `smp` to keep the weights,
`soft-movement` to let each matrix find its own density, and `cap` to add a contrastive loss under
two teachers.

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
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, RampShape, kept_share, ramp
from kdcli.pruners.selection import select_masks
from kdcli.recipe.sections import Section

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9)


class Ramp(Section):
    """Settings of methods that train the weights and lower the density along a ramp."""

    schedule: RampShape = "cubic"
    initial_fraction: float = Field(0.1, ge=0, le=1)
    final_fraction: float = Field(0.2, ge=0, le=1)
    embeddings: Literal["frozen", "trained"] = "frozen"

    @model_validator(mode="after")
    def _leaves_a_ramp(self) -> Ramp:
        if self.initial_fraction + self.final_fraction > 1:
            raise ValueError("the sum of initial_fraction and final_fraction must not exceed 1")
        return self

    def passed(self, done: int, steps: int) -> float:
        """Return the share of the ramp that has passed after `done` steps."""
        return ramp(done, steps, first=self.initial_fraction, last=self.final_fraction)

    def density(self, done: int, steps: int, final: float) -> float:
        """Return the share of the weights that is kept after `done` steps."""
        return kept_share(self.passed(done, steps), final, self.schedule)


class Settings(Ramp):
    """Keys of the recipe's `pruner:` section under `method: movement`."""

    masking: Literal["local", "global", "proportional"] = "local"
    temperature: float = Field(1.0, gt=0)
    score_lr: float = Field(1e-2, gt=0)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model.

    Args:
        settings: The recipe's settings.
        model: The model, which is changed in place.
        density: Share of the weights that the final masks keep.
        steps: Number of steps of the run.
        lr: The schedule's learning rate, which applies to the weights.

    Raises UsageError if the model type is unknown.
    """
    masks = attach(model, embeddings=settings.embeddings)
    density_at = partial(settings.density, steps=steps, final=density)

    def choose(done: int) -> dict[str, Tensor]:
        return select_masks(
            settings.masking, masks.scores(), masks.kinds, density_at(done), settings.temperature
        )

    return Pruner(
        masks,
        trains_weights=True,
        choose=choose,
        density=density_at,
        score_lr=settings.score_lr / lr,
    )
