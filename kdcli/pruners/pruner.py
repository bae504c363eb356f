"""The interface of a pruning method to the command that runs it, and the schedules that methods share.

    cubic   v_t = v_f + (1 − v_f)(1 − t/N)³        t < N, then v_f     (SMP eq. 6, as Zhu & Gupta 2017)
    linear  v_t = v_f + (1 − v_f)(1 − t/N)

`ramp` maps steps to t/N, and stays at 0 and 1 at both ends (movement pruning, Sanh et al. 2020, §5).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdcli.pruners.masked import Masks, is_score
from kdcli.types import ParamGroup

Shape = Literal["cubic", "linear"]
WEIGHT_LR = (
    3e-5  # Learning rate of fine-tuned weights (movement pruning) and of a new head (SMP, table 4)
)


@dataclass(frozen=True)
class Defaults:
    """What a method's authors ran it with, beyond its own settings."""

    lr: float  # of the schedule
    teacher: float  # weight of the teacher's term, if there is a teacher; the labels' is the rest
    head: Literal["embedding", "scratch"] = "scratch"  # frozen, made of label words; or trained
    warmup: float = (
        0.1  # share of the steps in which the rate rises; movement pruning: 5,400 of 55,330
    )
    exact: bool = (
        True  # the density can be chosen; else gates or thresholds and the regularizer decide it
    )


@dataclass
class Pruner:
    """A method bound to one model and the steps of one run; its functions take the number of steps done."""

    masks: Masks  # they keep everything before the first `after`
    trains_weights: bool  # False: only scores are trained; the caller thaws a new head
    choose: Callable[[int], dict[str, Tensor]]  # the masks
    density: (
        Callable[[int], float] | None
    )  # share that is kept; None where thresholds and regularizer decide it
    score_lr: float = 1.0  # a factor of the schedule's rate, as is `weight_lr`
    weight_lr: float = 1.0
    regularise: Callable[[int], dict[str, Tensor]] | None = (
        None  # weighted terms of the next step's loss
    )
    contrast: Callable[[Tensor, Tensor, Mapping[str, Tensor]], dict[str, Tensor]] | None = (
        None  # see `cap`
    )
    done: int = 0

    @torch.no_grad()
    def after(self, done: int) -> None:
        """Choose the masks that hold until the next call: a function of `done`, the weights and the scores."""
        self.done = done
        self.masks.set(self.choose(done))

    def terms(self) -> dict[str, Tensor]:
        """Weighted terms to add to the loss of this step; empty without a regularizer."""
        return {} if self.regularise is None else self.regularise(self.done)

    def param_group(self, name: str) -> ParamGroup:
        """How a parameter is trained; scores are never decayed."""
        return (
            ParamGroup(self.score_lr, decayed=False)
            if is_score(name)
            else ParamGroup(self.weight_lr)
        )


def ramp(done: int, steps: int, *, first: float = 0.0, last: float = 0.0) -> float:
    """Share of the ramp, 0 to 1, that is past after `done` of `steps` steps. `first`, `last`: shares of all steps
    before the ramp begins and after it has ended."""
    begin, end = first * steps, (1 - last) * steps
    # Before the first step all scores are equal: whole heads would go with all that feeds them, and get no gradient.
    if done == 0:
        return 0.0
    if done >= end:
        return 1.0
    return 0.0 if done <= begin else (done - begin) / (end - begin)


def progress(passed: float, shape: Shape) -> float:
    """0 to 1: how far the scheduled value has moved when `passed` of its ramp is past."""
    return 1 - (1 - passed) ** (3 if shape == "cubic" else 1)


def kept_share(passed: float, final: float, shape: Shape) -> float:
    """Share of the weights that is kept: from 1 to `final`."""
    return final if passed >= 1 else 1 - (1 - final) * progress(passed, shape)
