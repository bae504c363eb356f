"""Helpers of losses on hidden states: means over tokens, distances, and a learned projection."""

import torch.nn.functional as F
from torch import Tensor, nn


class StateProjection(nn.Linear):
    """A learned linear map, without bias, from the student's hidden states to the teacher's.

    It starts as the identity if the widths are equal.

    Args:
        student_width: Width of the student's hidden states.
        teacher_width: Width of the teacher's hidden states.
        pairs: The layers that it compares, as (student layer, teacher layer).
    """

    def __init__(self, student_width: int, teacher_width: int, *pairs: tuple[int, int]) -> None:
        super().__init__(student_width, teacher_width, bias=False)
        self.pairs = pairs
        if student_width == teacher_width:
            # The student consists of its teacher's layers, so its states are already close.
            nn.init.eye_(self.weight)


def token_mean(x_BL: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of [B, L] over the real tokens, a scalar, or 0 if there are none.

    `mask` is [B, L], non-zero at real tokens; or [B, 1, L, L], True where a query may attend; or
    None.
    """
    if mask is None:
        return x_BL.mean()
    real_BL = (mask if mask.dim() == 2 else mask.any(-1)[:, 0]).to(x_BL.dtype)
    return (x_BL * real_BL).sum() / real_BL.sum().clamp(min=1)


def masked_mse(teacher_BLD: Tensor, student_BLD: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean squared error over the real tokens and all D components, a float32 scalar.

    No gradient reaches the teacher. `mask` is [B, L] or [B, 1, L, L]; None if every token is real.
    """
    error_BLD = (student_BLD.float() - teacher_BLD.detach().float()).square()
    return error_BLD.mean() if mask is None else token_mean(error_BLD.mean(-1), mask)


def cosine_distance(teacher_BLD: Tensor, student_BLD: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of 1 - cosine over the real tokens, a float32 scalar.

    No gradient reaches the teacher. `mask` is [B, L] or [B, 1, L, L]; None if every token is real.
    """
    cosine_BL = F.cosine_similarity(teacher_BLD.detach().float(), student_BLD.float(), dim=-1)
    return token_mean(1 - cosine_BL, mask)
