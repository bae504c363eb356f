"""The loss against the labels of a task: what fine-tuning minimises and every distillation on a task adds."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kdcli.types import IGNORED, Count, Kind


def hard_loss(kind: Kind, logits: Tensor, labels: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Mean over what `counted` names, a float32 scalar: cross-entropy; `multi`: binary cross-entropy, a mean over
    classes; `score`: squared error; `span`: the mean of the cross-entropies of first and last token. `logits`: `class`
    and `multi` [B, C]; `score` [B, 1]; `tokens` [B, L, C]; `span` [B, L, 2]. `labels`: see `kdcli.types.Kind`.
    `mask_BL`: 1 = real token."""
    logits = logits.float()
    if kind == "multi":
        return F.binary_cross_entropy_with_logits(logits, labels)
    if kind == "score":
        return F.mse_loss(logits[:, 0], labels)
    if kind == "tokens":
        # A micro-batch without a labelled word has loss 0, not 0 / 0.
        summed = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return summed / (labels != IGNORED).sum().clamp(min=1)
    if kind == "span":
        if mask_BL is not None:
            # The padding of a batch must not change its loss.
            logits = logits.masked_fill(mask_BL[:, :, None] == 0, -torch.inf)
        return F.cross_entropy(logits.transpose(1, 2).flatten(0, 1), labels.flatten())
    return F.cross_entropy(logits, labels)


def counted(kind: Kind) -> Count:
    """What losses against a task's labels are means over: labelled words for `tokens`, otherwise rows."""
    return "labels" if kind == "tokens" else "rows"
