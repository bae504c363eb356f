"""The loss against the labels of a task: what fine-tuning descends, and what every distillation on a task adds to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kdcli.types import IGNORED, Kind


def hard_loss(kind: Kind, logits: Tensor, labels: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Mean loss over what `labelled` counts, in float32.

    Args:
        kind: of the task, which says what the shapes are (see `kdcli.types.Kind`).
        logits: `class` and `multi` [B, C]; `score` [B, 1]; `tokens` [B, L, C]; `span` [B, L, 2].
        labels: as in the batch.
        mask_BL: 1 = real token. The softmax of a `span` runs over real tokens only: what a batch is padded with must
            not change its loss.

    Returns:
        Scalar: cross-entropy; of `multi` binary cross-entropy, a mean over classes; of `score` squared error; of `span`
        the mean of the cross-entropies of first and last token.
    """
    logits = logits.float()
    if kind == "multi":
        return F.binary_cross_entropy_with_logits(logits, labels)
    if kind == "score":
        return F.mse_loss(logits[:, 0], labels)
    if kind == "tokens":
        # A micro-batch may hold no labelled word at all; its mean is then 0, not 0 / 0.
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return summed / (labels != IGNORED).sum().clamp(min=1)
    if kind == "span":
        if mask_BL is not None:
            logits = logits.masked_fill(mask_BL[:, :, None] == 0, -torch.inf)
        return F.cross_entropy(logits.transpose(1, 2).flatten(0, 1), labels.flatten())
    return F.cross_entropy(logits, labels)


def labelled(kind: Kind, labels: Tensor) -> float:
    """What a batch weighs in a mean: its labelled words, or its rows."""
    return float((labels != IGNORED).sum()) if kind == "tokens" else float(len(labels))
