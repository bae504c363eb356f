"""Density and regularizer as functions of the steps done.

    cubic   v_t = v_f + (1 − v_f)(1 − t/N)³        t < N, then v_f     (SMP eq. 6, as Zhu & Gupta 2017)
    linear  v_t = v_f + (1 − v_f)(1 − t/N)

`ramp` maps steps to t/N, and stays at 0 and 1 at both ends (movement pruning, Sanh et al. 2020, §5).
"""

from __future__ import annotations

from typing import Literal

Shape = Literal["cubic", "linear"]


def ramp(done: int, steps: int, *, first: float = 0.0, last: float = 0.0) -> float:
    """Share of the ramp, 0 to 1, that is past after `done` of `steps` steps.

    Args:
        first, last: shares of all steps before the ramp begins and after it has ended.
    """
    begin, end = first * steps, (1 - last) * steps
    # Before the first step all scores are equal: whole heads would go with all that feeds them, and get no gradient.
    if done == 0:
        return 0.0
    if done >= end:
        return 1.0
    return 0.0 if done <= begin else (done - begin) / (end - begin)


def progress(passed: float, shape: Shape) -> float:
    """0 to 1: how far the scheduled value has moved when `passed` of its ramp is past."""
    left = 1 - passed
    return 1 - (left**3 if shape == "cubic" else left)


def density(passed: float, final: float, shape: Shape) -> float:
    """Share of the weights that is kept: from 1 to `final`."""
    return final if passed >= 1 else 1 - (1 - final) * progress(passed, shape)
