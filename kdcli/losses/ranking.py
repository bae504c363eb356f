"""Losses of rerankers over lists of candidates. Each is a mean over lists.

With the student's scores s and the teacher's scores t:

    margin-mse   mean over pairs (i, j) of a list of ((s_i - s_j) - (t_i - t_j))²
    listwise     T² KL(softmax(t / T) ‖ softmax(s / T))
    pointwise    mean over a list of (s_i - t_i)²

`margin-mse` is from https://arxiv.org/abs/2010.02666 and `listwise` is ListNet (Cao et al. 2007).
The pairs of `margin-mse` consist of a more and a less relevant passage. Lists without such pairs
use all of their pairs. Against labels alone, `pointwise` is the cross-entropy of each passage's
sigmoid, and `listwise` is the cross-entropy of the list's softmax.

When to use: `margin-mse` if only the differences of the teacher's scores matter. Prefer `listwise`
to match the order at the top of long lists, and `pointwise` if the scores themselves must be kept.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Ranking = Literal["margin-mse", "listwise", "pointwise"]


def pad_lists(values_R: Tensor, places_QM: Tensor) -> Tensor:
    """Arrange values by list, [Q, M], padded with 0.

    `places_QM` holds the index into `values_R` of each candidate, and -1 for padding.
    """
    return torch.where(places_QM < 0, values_R.new_zeros(()), values_R[places_QM.clamp(min=0)])


def score_loss(
    kind: Ranking,
    s_QM: Tensor,
    t_QM: Tensor,
    labels_QM: Tensor,
    real_QM: Tensor,
    temperature: float,
) -> Tensor:
    """Compute the loss against a teacher's scores, a float32 scalar.

    Args:
        kind: The loss.
        s_QM, t_QM: The student's and the teacher's scores of M candidates per list. No gradient
            reaches the teacher.
        labels_QM: Relevance grades, NaN if unknown. Only `margin-mse` reads them.
        real_QM: True for candidates, False for padding.
        temperature: T > 0, for `listwise` only.
    """
    s_QM, t_QM = s_QM.float(), t_QM.detach().float()
    if kind == "pointwise":
        return _mean_of_lists((s_QM - t_QM).square(), real_QM)
    if kind == "listwise":
        log_s, log_t = (_log_softmax(x / temperature, real_QM) for x in (s_QM, t_QM))
        return temperature**2 * (log_t.exp() * (log_t - log_s)).sum(1).mean()
    both_QMM = real_QM[:, :, None] & real_QM[:, None, :]
    above_QMM = (labels_QM[:, :, None] > labels_QM[:, None, :]) & both_QMM
    all_QMM = both_QMM & torch.ones_like(both_QMM[0]).triu(1)
    has_labels_Q11 = above_QMM.any(-1, keepdim=True).any(-2, keepdim=True)
    pairs_QMM = torch.where(has_labels_Q11, above_QMM, all_QMM)
    error_QM = s_QM - t_QM
    margins_QMM = (error_QM[:, :, None] - error_QM[:, None, :]).square()
    return _mean_of_lists(margins_QMM.flatten(1), pairs_QMM.flatten(1))


def label_loss(kind: Ranking, s_QM: Tensor, labels_QM: Tensor, real_QM: Tensor) -> Tensor:
    """Compute the loss against relevance labels, a float32 scalar.

    The loss of a list without labels is 0. With `listwise`, the loss of a list without a relevant
    passage is 0 too.

    Args:
        kind: `pointwise`; any other kind computes `listwise`.
        s_QM: The student's scores of M candidates per list.
        labels_QM: Relevance grades, NaN if unknown.
        real_QM: True for candidates, False for padding.
    """
    s_QM, known_QM = s_QM.float(), real_QM & ~labels_QM.isnan()
    labels_QM = labels_QM.nan_to_num(0.0)
    if kind == "pointwise":
        relevant_QM = (labels_QM > 0).float()
        losses_QM = F.binary_cross_entropy_with_logits(s_QM, relevant_QM, reduction="none")
        return _mean_of_lists(losses_QM, known_QM)
    share_QM = labels_QM * known_QM
    share_QM = share_QM / share_QM.sum(1, keepdim=True).clamp(min=1e-9)
    return -(share_QM * _log_softmax(s_QM, real_QM)).sum(1).mean()


def _log_softmax(x_QM: Tensor, real_QM: Tensor) -> Tensor:
    """Return the log-softmax over each list, and 0 for padding."""
    return x_QM.masked_fill(~real_QM, -torch.inf).log_softmax(1).masked_fill(~real_QM, 0.0)


def _mean_of_lists(x_QM: Tensor, chosen_QM: Tensor) -> Tensor:
    """Return the mean over lists of each list's mean over its chosen elements."""
    return ((x_QM * chosen_QM).sum(1) / chosen_QM.sum(1).clamp(min=1)).mean()
