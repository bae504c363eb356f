"""How much is kept, and how strongly a regulariser presses, after a number of steps. Pure functions.

    cubic   v_t = v_f + (1 − v_f)(1 − t/N)³        t < N, then v_f     (SMP eq. 6, as Zhu & Gupta 2017)
    linear  v_t = v_f + (1 − v_f)(1 − t/N)

`t` counts the steps done, `N` those over which the density falls. Movement pruning (Sanh et al. 2020, §5) holds still
at both ends: `ramp` maps its steps to t/N. What falls from 1 to v_f here rises from 0 to 1 in a regulariser.
"""

from __future__ import annotations

from typing import Literal

Shape = Literal["cubic", "linear"]


def ramp(done: int, steps: int, *, first: float = 0.0, last: float = 0.0) -> float:
    """Share of the ramp that lies behind after `done` of `steps` steps: 0 … 1, and 0 before the first step.

    Args:
        first, last: shares of all steps before the ramp begins and after it has ended.
    """
    begin, end = first * steps, (1 - last) * steps
    # Before the first step all learned scores are the same: whole heads would go, and, as what feeds them and what
    # they feed went together, get no gradient any more.
    if done == 0:
        return 0.0
    if done >= end:
        return 1.0
    return 0.0 if done <= begin else (done - begin) / (end - begin)


def progress(passed: float, shape: Shape) -> float:
    """0 … 1: how far what is scheduled has come when `passed` of its ramp lies behind."""
    left = 1 - passed
    return 1 - (left**3 if shape == "cubic" else left)


def density(passed: float, final: float, shape: Shape) -> float:
    """Share of the weights that is kept: 1 … `final`."""
    return final if passed >= 1 else 1 - (1 - final) * progress(passed, shape)
