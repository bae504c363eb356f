"""Losses of rerankers over lists of candidates; each is a mean over lists. s: the student's scores, t: the teacher's.

    margin-mse   mean over pairs (i, j) of a list of ((s_i - s_j) - (t_i - t_j))^2   (https://arxiv.org/abs/2010.02666)
    listwise     T^2 KL(softmax(t / T) || softmax(s / T))                            (ListNet, Cao et al. 2007)
    pointwise    mean over a list of (s_i - t_i)^2

The pairs are those of a relevant and a less relevant passage, or all pairs of a list without such labels. Against
labels alone: the cross-entropy of each passage's sigmoid (`pointwise`), or of the softmax of the list (`listwise`).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Ranking = Literal["margin-mse", "listwise", "pointwise"]


def padded(values_R: Tensor, places_QM: Tensor) -> Tensor:
    """Values list by list, [Q, M], 0 behind each. `places_QM`: which value stands where, -1 behind a list."""
    return torch.where(places_QM < 0, values_R.new_zeros(()), values_R[places_QM.clamp(min=0)])


def score_loss(
    kind: Ranking,
    s_QM: Tensor,
    t_QM: Tensor,
    labels_QM: Tensor,
    real_QM: Tensor,
    temperature: float,
) -> Tensor:
    """Against a teacher's scores; labels are NaN where there are none. A float32 scalar."""
    s_QM, t_QM = s_QM.float(), t_QM.detach().float()
    if kind == "pointwise":
        return _mean_of_lists((s_QM - t_QM).square(), real_QM)
    if kind == "listwise":
        log_s, log_t = (_log_softmax(x / temperature, real_QM) for x in (s_QM, t_QM))
        return temperature**2 * (log_t.exp() * (log_t - log_s)).sum(1).mean()
    both_QMM = real_QM[:, :, None] & real_QM[:, None, :]
    above_QMM = (labels_QM[:, :, None] > labels_QM[:, None, :]) & both_QMM
    all_QMM = both_QMM & torch.ones_like(both_QMM[0]).triu(1)
    pairs_QMM = torch.where(
        above_QMM.any(-1, keepdim=True).any(-2, keepdim=True), above_QMM, all_QMM
    )
    off_QM = s_QM - t_QM
    return _mean_of_lists(
        (off_QM[:, :, None] - off_QM[:, None, :]).square().flatten(1), pairs_QMM.flatten(1)
    )


def label_loss(kind: Ranking, s_QM: Tensor, labels_QM: Tensor, real_QM: Tensor) -> Tensor:
    """Against relevance; a list without a label, or of `listwise` without a relevant passage, counts 0."""
    s_QM, known_QM = s_QM.float(), real_QM & ~labels_QM.isnan()
    labels_QM = labels_QM.nan_to_num(0.0)
    if kind == "pointwise":
        losses_QM = F.binary_cross_entropy_with_logits(
            s_QM, (labels_QM > 0).float(), reduction="none"
        )
        return _mean_of_lists(losses_QM, known_QM)
    share_QM = labels_QM * known_QM
    share_QM = share_QM / share_QM.sum(1, keepdim=True).clamp(min=1e-9)
    return -(share_QM * _log_softmax(s_QM, real_QM)).sum(1).mean()


def _log_softmax(x_QM: Tensor, real_QM: Tensor) -> Tensor:
    """Over each list; 0 behind it."""
    return x_QM.masked_fill(~real_QM, -torch.inf).log_softmax(1).masked_fill(~real_QM, 0.0)


def _mean_of_lists(x_QM: Tensor, counted_QM: Tensor) -> Tensor:
    return ((x_QM * counted_QM).sum(1) / counted_QM.sum(1).clamp(min=1)).mean()
