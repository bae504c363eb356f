"""Magnitude pruning while fine-tuning (Zhu & Gupta 2017, https://arxiv.org/abs/1710.01878; a baseline of SMP).

    W' = W ⊙ Top_v(|W|)

with the density of a cubic. There are no scores to learn: a removed weight keeps its value and its momentum, and comes
back when others fall below it.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners import schedule
from kdcli.pruners.masked import attach
from kdcli.pruners.movement import Ramp
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, freeze_embeddings
from kdcli.pruners.selection import select

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9)


class Settings(Ramp):
    """Keys of the recipe's `pruner:` section under `method: magnitude`."""

    masking: Literal["local", "global"] = "local"


def pruner(settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float) -> Pruner:
    """Put masks on a model; arguments as in `kdcli.pruners.smp`, but `lr` is the weights'."""
    masks = attach(model, start=None)
    if settings.embeddings == "frozen":
        freeze_embeddings(masks)

    def density_at(done: int) -> float:
        return schedule.density(settings.passed(done, steps), density, settings.schedule)

    def choose(done: int) -> dict[str, Tensor]:
        sizes = {name: weight.abs() for name, weight in masks.weights().items()}
        return select(settings.masking, sizes, masks.kinds, density_at(done))

    return Pruner(masks, trains_weights=True, choose=choose, density=density_at)
