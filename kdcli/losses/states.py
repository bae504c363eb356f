"""What losses between hidden states share: means over real tokens, squared error, and the matrix between two widths."""

import torch.nn.functional as F
from torch import Tensor, nn


class StateProjection(nn.Linear):
    """A learned matrix without bias from hidden states of the student to the teacher's; the identity at first if the
    widths are equal. `pairs`: the layers that it compares, the student's first."""

    def __init__(self, student_width: int, teacher_width: int, *pairs: tuple[int, int]) -> None:
        super().__init__(student_width, teacher_width, bias=False)
        self.pairs = pairs
        if student_width == teacher_width:
            # The student is made of its teacher's layers, so its states are near already.
            nn.init.eye_(self.weight)


def token_mean(x_BL: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real tokens; 0 if there are none. `mask` as in `kdcli.losses.relation.relation_kl`."""
    if mask is None:
        return x_BL.mean()
    real_BL = (mask if mask.dim() == 2 else mask.any(-1)[:, 0]).to(x_BL.dtype)
    return (x_BL * real_BL).sum() / real_BL.sum().clamp(min=1)


def masked_mse(teacher_BLD: Tensor, student_BLD: Tensor, mask: Tensor | None) -> Tensor:
    """Mean squared error over the real tokens and all D components, in float32."""
    error_BLD = (student_BLD.float() - teacher_BLD.detach().float()).square()
    return error_BLD.mean() if mask is None else token_mean(error_BLD.mean(-1), mask)


def cosine_distance(teacher_BLD: Tensor, student_BLD: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of 1 - cosine over the real tokens, in float32; no gradient reaches the teacher."""
    return token_mean(
        1 - F.cosine_similarity(teacher_BLD.detach().float(), student_BLD.float(), dim=-1), mask
    )
