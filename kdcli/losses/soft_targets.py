"""Soft targets: a teacher's logits as labels (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, §2).

    L = T² · KL(softmax(z_T / T) ‖ softmax(z_S / T))

T² keeps the gradient's size as the temperature rises. What has no softmax has its own form: scores are learned by
squared error (the divergence of one logit is zero whatever it is), labels of which several may hold by the divergence
of each yes or no.
"""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from kdcli.types import IGNORED, Kind, ModelShape, Needs, Objective

INPUTS = frozenset({"task"})
STAGE = "joint"
KD = {"weight": 0.5, "temperature": 2.0}


class Settings(BaseModel):
    """The recipe's `loss:` section under `method: soft-targets` holds nothing: all there is to say stands in `kd:`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Nothing beside the loss against labels and logits, which every distillation on a task has."""
    return Objective(teacher_needs=Needs(), student_needs=Needs(), projections=nn.ModuleDict(), terms=lambda t, s: {})


def soft_loss(
    kind: Kind, teacher: Tensor, student: Tensor, labels: Tensor, mask_BL: Tensor | None, temperature: float
) -> Tensor:
    """Mean loss over what `kdcli.losses.hard.labelled` counts, in float32; no gradient reaches the teacher.

    Args:
        kind: of the task; the shapes of both logits are those of `hard_loss`.
        labels: of `tokens` they say which words count; otherwise not looked at.
        mask_BL: 1 = real token; the softmax of a `span` runs over real tokens only.
        temperature: T > 0.

    Returns:
        Scalar; of `span` the mean over first and last token, of `multi` over the classes.
    """
    teacher, student = teacher.detach().float(), student.float()
    if kind == "score":
        return F.mse_loss(student[:, 0], teacher[:, 0])
    factor = temperature**2
    if kind == "multi":
        soft = (teacher / temperature).sigmoid()
        logits = student / temperature
        entropy = F.binary_cross_entropy_with_logits(teacher / temperature, soft)
        return factor * (F.binary_cross_entropy_with_logits(logits, soft) - entropy)
    if kind == "tokens":
        counted = labels.flatten() != IGNORED
        teacher, student = teacher.flatten(0, 1)[counted], student.flatten(0, 1)[counted]
    elif kind == "span":
        if mask_BL is not None:
            # Not -inf: the divergence would take 0 · (inf - inf) for a number.
            teacher, student = (x.masked_fill(mask_BL[:, :, None] == 0, -1e4) for x in (teacher, student))
        teacher, student = (x.transpose(1, 2).flatten(0, 1) for x in (teacher, student))
    summed = F.kl_div(
        F.log_softmax(student / temperature, -1),
        F.log_softmax(teacher / temperature, -1),
        reduction="sum",
        log_target=True,
    )
    # A micro-batch may hold no labelled word at all.
    return factor * summed / max(1, len(student))
