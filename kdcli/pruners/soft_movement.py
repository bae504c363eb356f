"""Soft movement pruning: a threshold instead of the top v scores.

Sanh et al. 2020, https://arxiv.org/abs/2005.07683, §4:

    W' = W ⊙ (σ(S) > τ)
    L = L_task + λ · R(S),    R = mean over matrices of mean σ(S)

τ and λ rise together along the cubic of movement pruning. λ decides how many weights are left in
each matrix, so the density cannot be chosen. The defaults, which the authors used for SQuAD, leave
a few per cent.

When to use: the matrices should find their own densities. Prefer `movement` if the density must be
exact, and `l0` for random gates. λ depends on the number of steps: tune it for short runs.

    method: soft-movement
    pruner: {threshold: 0.1, regularizer: 400}
"""

from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.pruners.masked import attach
from kdcli.pruners.movement import Ramp
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, progress
from kdcli.pruners.selection import threshold
from kdcli.types import REGULARIZER

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9, exact=False)


class Settings(Ramp):
    """Keys of the recipe's `pruner:` section under `method: soft-movement`."""

    threshold: float = Field(0.1, ge=0, lt=1)
    regularizer: float = Field(400.0, ge=0)
    score_lr: float = Field(1e-2, gt=0)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model.

    Args:
        settings: The recipe's settings.
        model: The model, which is changed in place.
        density: Not used, because the threshold and the regularizer decide the density.
        steps: Number of steps of the run.
        lr: The schedule's learning rate, which applies to the weights.

    Raises UsageError if the model type is unknown.
    """
    masks = attach(model, embeddings=settings.embeddings)

    def ramp_progress(done: int) -> float:
        return progress(settings.passed(done, steps), settings.schedule)

    def choose(done: int) -> dict[str, Tensor]:
        return threshold(masks.scores(), settings.threshold * ramp_progress(done))

    def regularise(done: int) -> dict[str, Tensor]:
        return {REGULARIZER: settings.regularizer * ramp_progress(done) * masks.mean_sigmoid()}

    return Pruner(
        masks,
        trains_weights=True,
        choose=choose,
        density=None,
        score_lr=settings.score_lr / lr,
        regularise=regularise if settings.regularizer else None,
    )
