"""Magnitude pruning: fine-tune, and remove the smallest weights.

Zhu & Gupta 2017, https://arxiv.org/abs/1710.01878:

    W' = W ⊙ Top_v(|W|)        v falls along the cubic of `kdcli.pruners.movement`

When to use: as the baseline of `smp` and `movement`. It has no scores and is hardly slower than
fine-tuning. Prefer `smp` at a density of 10 % or less, where it scored higher
(docs/evidence/pruning.md).

    method: magnitude
    pruner: {masking: global}
"""

from functools import partial
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners.masked import attach
from kdcli.pruners.movement import Ramp
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner
from kdcli.pruners.selection import select_masks

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9)


class Settings(Ramp):
    """Keys of the recipe's `pruner:` section under `method: magnitude`."""

    masking: Literal["local", "global"] = "local"


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model.

    Args:
        settings: The recipe's settings.
        model: The model, which is changed in place.
        density: Share of the weights that the final masks keep.
        steps: Number of steps of the run.
        lr: Not used, because there are no scores.

    Raises UsageError if the model type is unknown.
    """
    masks = attach(model, start=None, embeddings=settings.embeddings)
    density_at = partial(settings.density, steps=steps, final=density)

    def choose(done: int) -> dict[str, Tensor]:
        # A removed weight keeps its value and momentum, and returns when others fall below it.
        magnitudes = {name: weight.abs() for name, weight in masks.weights().items()}
        return select_masks(settings.masking, magnitudes, masks.kinds, density_at(done))

    return Pruner(masks, trains_weights=True, choose=choose, density=density_at)
