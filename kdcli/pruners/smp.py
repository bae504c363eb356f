"""Static model pruning (Jiang et al. 2023, https://arxiv.org/abs/2210.06210): only the mask is learned.

    W' = W ⊙ M,  M = mask(S),  S = 0 at first         §3.2; W, embeddings, norms, biases and head stay as they are
    ∂L/∂S = W ⊙ ∂L/∂W'                                straight through the mask, for removed weights too
    L = L_task + λ_R · progress · R(S)                §3.4

`masking: proportional` is the paper's (eq. 5, `kdcli.pruners.selection`). R is the mean over matrices of mean σ(S), as
in the authors' code: with the sum that the paper prints, λ_R = 400 would drown the task. `progress` is
1 − (1 − t/T)³ (`regularizer_schedule: steps`, their code), T being `regularizer_fraction` of all steps, then 1; or it
follows the density, which is reached after N steps (`density`, the paper). N is `warmup_steps`, else `warmup_fraction`
of all steps.

Relations: a task costs a mask file beside one shared base; every other method saves a whole model. Take `movement` or
`magnitude` when the weights may change.

    method: smp
    pruner: {masking: proportional, regularizer: 400}
"""

from functools import partial
from typing import Literal

from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.pruners.masked import attach
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, Shape, kept_share, progress, ramp
from kdcli.pruners.selection import select, threshold
from kdcli.recipe.sections import Section

DEFAULTS = Defaults(lr=2e-2, teacher=0.5, head="embedding", warmup=0.0)


class Settings(Section):
    """Keys of the recipe's `pruner:` section under `method: smp`."""

    masking: Literal["local", "global", "proportional", "threshold"] = "proportional"
    temperature: float = Field(1.0, gt=0)
    threshold: float = Field(0.1, ge=0, lt=1)
    schedule: Shape = "cubic"
    warmup_fraction: float = Field(0.6, ge=0, le=1)
    warmup_steps: int | None = Field(None, ge=0)
    regularizer: float = Field(400.0, ge=0)
    regularizer_schedule: Literal["steps", "density"] = "steps"
    regularizer_fraction: float = Field(1.0, gt=0, le=1)
    weight_lr: float = Field(WEIGHT_LR, gt=0)

    def rising(self, steps: int) -> float:
        """N of a run of so many steps. Raises UsageError: the run is shorter."""
        if self.warmup_steps is None:
            return self.warmup_fraction * steps
        if self.warmup_steps > steps:
            raise UsageError(
                f"'pruner.warmup_steps' {self.warmup_steps} is more than the {steps} steps of the run",
                "train longer, or --set pruner.warmup_steps=null for 'pruner.warmup_fraction' of them",
            )
        return self.warmup_steps


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model and freeze it. `density`: share of the weights that is kept in the end, above 0 and at most
    1. `steps`: of the run. `lr`: the schedule's learning rate, which is that of the scores; `weight_lr` is that of a
    trained head. Raises UsageError: the density would not be reached within the run."""
    masks, passed = (
        attach(model, frozen=True),
        partial(ramp, steps=steps, last=1 - settings.rising(steps) / steps),
    )

    def density_at(done: int) -> float:
        return kept_share(passed(done), density, settings.schedule)

    def choose(done: int) -> dict[str, Tensor]:
        if settings.masking == "threshold":
            return threshold(
                masks.scores(), settings.threshold * progress(passed(done), settings.schedule)
            )
        return select(
            settings.masking, masks.scores(), masks.kinds, density_at(done), settings.temperature
        )

    def regularise(done: int) -> dict[str, Tensor]:
        by_steps = settings.regularizer_schedule == "steps"
        past = min(1.0, done / (settings.regularizer_fraction * steps))
        risen = progress(past, "cubic") if by_steps else progress(passed(done), settings.schedule)
        return {"regularizer": settings.regularizer * risen * masks.mean_sigmoid()}

    exact = None if settings.masking == "threshold" else density_at
    weight_lr, term = settings.weight_lr / lr, regularise if settings.regularizer else None
    return Pruner(
        masks,
        trains_weights=False,
        choose=choose,
        density=exact,
        weight_lr=weight_lr,
        regularise=term,
    )
