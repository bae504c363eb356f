"""Soft movement pruning (Sanh et al. 2020, https://arxiv.org/abs/2005.07683, §4): a threshold instead of a top-v.

    W' = W ⊙ (σ(S) > τ)
    L = L_task + λ · R(S),    R = mean over matrices of mean σ(S)

τ and λ rise together along the cubic of movement pruning. λ decides how much is left, matrix by matrix, so the density
cannot be chosen. That of the defaults, the authors' for SQuAD, leaves a few per cent.

Relations: take `movement` when the density must be exact, this when the matrices should share it out themselves. `l0`
does the same with random gates. λ belongs to a number of steps: tune it for short runs.

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

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9, exact=False)


class Settings(Ramp):
    """Keys of the recipe's `pruner:` section under `method: soft-movement`."""

    threshold: float = Field(0.1, ge=0, lt=1)
    regularizer: float = Field(400.0, ge=0)
    score_lr: float = Field(1e-2, gt=0)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model; arguments as in `kdcli.pruners.movement`, of which `density` is not used."""
    masks = attach(model, embeddings=settings.embeddings)

    def risen(done: int) -> float:
        return progress(settings.passed(done, steps), settings.schedule)

    def choose(done: int) -> dict[str, Tensor]:
        return threshold(masks.scores(), settings.threshold * risen(done))

    def regularise(done: int) -> dict[str, Tensor]:
        return {"regularizer": settings.regularizer * risen(done) * masks.mean_sigmoid()}

    score_lr, term = settings.score_lr / lr, regularise if settings.regularizer else None
    return Pruner(
        masks, trains_weights=True, choose=choose, density=None, score_lr=score_lr, regularise=term
    )
