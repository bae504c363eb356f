"""Define the interface between a pruning method and the verb that runs it, and the schedules.

    cubic   v_t = v_f + (1 − v_f)(1 − t/N)³        t < N  (SMP eq. 6, as Zhu & Gupta 2017)
    linear  v_t = v_f + (1 − v_f)(1 − t/N)

`ramp` maps steps to t/N. It stays at 0 for some steps at the start, and at 1 for some steps at the
end (movement pruning, Sanh et al. 2020, §5).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdcli.pruners.masked import Masks, is_score
from kdcli.types import ParamGroup

RampShape = Literal["cubic", "linear"]
# Learning rate of fine-tuned weights (movement pruning) and of a new head (SMP, table 4).
WEIGHT_LR = 3e-5


@dataclass(frozen=True)
class Defaults:
    """The values that a method's authors used, apart from the method's own settings.

    Attributes:
        lr: The schedule's learning rate.
        teacher: Weight of the teacher's term, if there is a teacher. The labels' term has the rest.
        head: `embedding` is frozen and made of label words; `scratch` is trained.
        warmup: Share of the steps in which the rate rises. Movement pruning uses 5,400 of 55,330.
        exact: Whether the density can be chosen. Otherwise gates or thresholds, together with the
            regularizer, decide it.
    """

    lr: float
    teacher: float
    head: Literal["embedding", "scratch"] = "scratch"
    warmup: float = 0.1
    exact: bool = True


@dataclass
class Pruner:
    """A method bound to one model and the steps of one run.

    Attributes:
        masks: The model's masks. They keep everything before the first call of `after`.
        trains_weights: If False, only scores are trained. The caller unfreezes a new head.
        choose: Number of finished steps -> masks by name.
        density: Number of finished steps -> share of the weights that is kept. None if thresholds
            and the regularizer decide it.
        score_lr: Factor of the schedule's rate for the scores.
        weight_lr: Factor of the schedule's rate for the weights.
        regularise: Number of finished steps -> weighted terms of the next step's loss.
        contrast: See `kdcli.pruners.cap`.
        done: Number of finished steps.
    """

    masks: Masks
    trains_weights: bool
    choose: Callable[[int], dict[str, Tensor]]
    density: Callable[[int], float] | None
    score_lr: float = 1.0
    weight_lr: float = 1.0
    regularise: Callable[[int], dict[str, Tensor]] | None = None
    contrast: Callable[[Tensor, Tensor, Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    done: int = 0

    @torch.no_grad()
    def after(self, done: int) -> None:
        """Choose the masks until the next call, from `done`, the weights and the scores."""
        self.done = done
        self.masks.set(self.choose(done))

    def terms(self) -> dict[str, Tensor]:
        """Return the weighted terms to add to this step's loss. Empty without a regularizer."""
        return {} if self.regularise is None else self.regularise(self.done)

    def param_group(self, name: str) -> ParamGroup:
        """Return how to train a parameter. Scores have no weight decay."""
        if is_score(name):
            return ParamGroup(self.score_lr, decayed=False)
        return ParamGroup(self.weight_lr)


def ramp(done: int, steps: int, *, first: float = 0.0, last: float = 0.0) -> float:
    """Return the share of the ramp, 0 to 1, that has passed after `done` of `steps` steps.

    `first` and `last` are the shares of all steps before the ramp begins and after it has ended.
    """
    begin, end = first * steps, (1 - last) * steps
    # Before the first step, all scores are equal. Whole heads would be removed, together with
    # everything that feeds them, and would get no gradient.
    if done == 0:
        return 0.0
    if done >= end:
        return 1.0
    return 0.0 if done <= begin else (done - begin) / (end - begin)


def progress(passed: float, shape: RampShape) -> float:
    """Return how far a scheduled value has moved, 0 to 1, when `passed` of its ramp has passed."""
    power = 3 if shape == "cubic" else 1
    return 1 - (1 - passed) ** power


def kept_share(passed: float, final: float, shape: RampShape) -> float:
    """Return the share of the weights that is kept, which falls from 1 to `final`."""
    return final if passed >= 1 else 1 - (1 - final) * progress(passed, shape)
