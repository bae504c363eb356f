"""The loss against a task's labels.

Fine-tuning minimises it, and every distillation on a task adds it to the loss against the teacher.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kdcli.types import IGNORED, Count, Kind


def hard_loss(kind: Kind, logits: Tensor, labels: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Compute the loss against labels, a float32 scalar and a mean over what `mean_over` names.

    It is the cross-entropy, except for three kinds of tasks. `multi` uses the binary cross-entropy,
    averaged over classes. `score` uses the squared error. `span` uses the mean of the
    cross-entropies of the first and the last token.

    Args:
        kind: The kind of task.
        logits: [B, C] for `class` and `multi`; [B, 1] for `score`; [B, L, C] for `tokens`;
            [B, L, 2] for `span`.
        labels: As described at `kdcli.types.Kind`.
        mask_BL: 1 for real tokens.
    """
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


def mean_over(kind: Kind) -> Count:
    """Return what losses against labels are means over: labels for `tokens`, otherwise rows."""
    return "labels" if kind == "tokens" else "rows"
