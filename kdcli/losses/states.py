"""Squared error between hidden states, and the learned matrix between states of different widths."""

from __future__ import annotations

from torch import Tensor, nn


def projection(student_width: int, teacher_width: int) -> nn.Linear:
    """A learned bias-free matrix from the student's width to the teacher's.

    Between equal widths it starts as the identity: a student that is made of its teacher's layers is near already.
    """
    made = nn.Linear(student_width, teacher_width, bias=False)
    if student_width == teacher_width:
        nn.init.eye_(made.weight)
    return made


def masked_mse(teacher_BLD: Tensor, student_BLD: Tensor, mask: Tensor | None) -> Tensor:
    """Mean squared error over the real tokens and all D components, in float32; `mask` as in `relation_kl`."""
    error_BLD = (student_BLD.float() - teacher_BLD.detach().float()).square()
    if mask is None:
        return error_BLD.mean()
    real_BL = (mask if mask.dim() == 2 else mask.any(-1)[:, 0]).to(error_BLD.dtype)
    return (error_BLD.mean(-1) * real_BL).sum() / real_BL.sum().clamp(min=1)
