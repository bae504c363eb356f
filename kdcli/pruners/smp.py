"""Static model pruning: train only the mask.

Jiang et al. 2023, https://arxiv.org/abs/2210.06210:

    W' = W ⊙ M,  M = mask(S),  S = 0 at first    §3.2; everything else is frozen
    ∂L/∂S = W ⊙ ∂L/∂W'                           straight through the mask, for removed weights too
    L = L_task + λ_R · progress · R(S)           §3.4

The weights, the embeddings, the norms, the biases and the head do not change.
`masking: proportional` is the paper's masking function (eq. 5, `kdcli.pruners.selection`). R is the
mean over matrices of mean σ(S), as in the authors' code. With the sum that the paper prints, λ_R =
400 would outweigh the task. There are two schedules:

* `regularizer_schedule: steps`, as in the authors' code: `progress` is 1 − (1 − t/T)³, where T is
  `regularizer_fraction` of all steps, and 1 after T steps.
* `regularizer_schedule: density`, as in the paper: `progress` follows the density, which reaches
  its final value after N steps. N is `warmup_steps` if set, otherwise `warmup_fraction` of all
  steps.

When to use: several tasks share one model, because a task costs only a mask file. Prefer `movement`
or `magnitude` if the weights may change.

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
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner, RampShape, kept_share, progress, ramp
from kdcli.pruners.selection import select_masks, threshold
from kdcli.recipe.sections import Section
from kdcli.types import REGULARIZER

DEFAULTS = Defaults(lr=2e-2, teacher=0.5, head="embedding", warmup=0.0)


class Settings(Section):
    """Keys of the recipe's `pruner:` section under `method: smp`."""

    masking: Literal["local", "global", "proportional", "threshold"] = "proportional"
    temperature: float = Field(1.0, gt=0)
    threshold: float = Field(0.1, ge=0, lt=1)
    schedule: RampShape = "cubic"
    warmup_fraction: float = Field(0.6, ge=0, le=1)
    warmup_steps: int | None = Field(None, ge=0)
    regularizer: float = Field(400.0, ge=0)
    regularizer_schedule: Literal["steps", "density"] = "steps"
    regularizer_fraction: float = Field(1.0, gt=0, le=1)
    weight_lr: float = Field(WEIGHT_LR, gt=0)

    def rising(self, steps: int) -> float:
        """Return N for a run of `steps` steps.

        Raises UsageError if the run is shorter than N.
        """
        if self.warmup_steps is None:
            return self.warmup_fraction * steps
        if self.warmup_steps > steps:
            raise UsageError(
                f"'pruner.warmup_steps' is {self.warmup_steps}, but the run has only {steps} steps",
                "train longer, or use --set pruner.warmup_steps=null to set N by "
                "'pruner.warmup_fraction'",
            )
        return self.warmup_steps


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model and freeze it.

    Args:
        settings: The recipe's settings. `weight_lr` applies to a trained head.
        model: The model, which is changed in place.
        density: Share of the weights that the final masks keep. `masking: threshold` ignores it.
        steps: Number of steps of the run.
        lr: The schedule's learning rate, which applies to the scores.

    Raises UsageError if the model type is unknown, or if the density would not be reached within
    the run.
    """
    masks = attach(model, frozen=True)
    passed = partial(ramp, steps=steps, last=1 - settings.rising(steps) / steps)

    def density_at(done: int) -> float:
        return kept_share(passed(done), density, settings.schedule)

    def density_progress(done: int) -> float:
        return progress(passed(done), settings.schedule)

    def choose(done: int) -> dict[str, Tensor]:
        if settings.masking == "threshold":
            return threshold(masks.scores(), settings.threshold * density_progress(done))
        return select_masks(
            settings.masking, masks.scores(), masks.kinds, density_at(done), settings.temperature
        )

    def regularizer_progress(done: int) -> float:
        if settings.regularizer_schedule == "density":
            return density_progress(done)
        return progress(min(1.0, done / (settings.regularizer_fraction * steps)), "cubic")

    def regularise(done: int) -> dict[str, Tensor]:
        weight = settings.regularizer * regularizer_progress(done)
        return {REGULARIZER: weight * masks.mean_sigmoid()}

    return Pruner(
        masks,
        trains_weights=False,
        choose=choose,
        density=None if settings.masking == "threshold" else density_at,
        weight_lr=settings.weight_lr / lr,
        regularise=regularise if settings.regularizer else None,
    )
