"""Soft targets: a teacher's logits as labels (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, §2).

    L = T² · KL(softmax(z_T / T) ‖ softmax(z_S / T))

T² keeps the gradient's size as the temperature rises. Scores use squared error, for the divergence of one logit is
always 0; several labels per text use the divergence of each yes or no.

Relations: the loss that every distillation on a task has, and this method has nothing else. Take it first; `pkd` adds
hidden states, `tinybert` adds a stage before it.

    method: soft-targets
    kd: {weight: 0.5, temperature: 2.0}
"""

import torch.nn.functional as F
from torch import Tensor, nn

from kdcli.recipe.sections import Section
from kdcli.types import IGNORED, Kind, ModelShape, Needs, Objective

INPUTS = frozenset({"task"})
STAGE = "joint"
KD = {"weight": 0.5, "temperature": 2.0}


class Settings(Section):
    """It has no settings in `loss:`; weight and temperature are in `kd:`."""


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """No terms: the training on the task adds labels and soft targets."""
    return Objective(Needs(), Needs(), nn.ModuleDict(), terms=lambda t, s: {}, over={})


def soft_loss(
    kind: Kind,
    teacher: Tensor,
    student: Tensor,
    labels: Tensor,
    mask_BL: Tensor | None,
    temperature: float,
) -> Tensor:
    """Mean over what `kdcli.losses.hard.counted` names, a float32 scalar; no gradient reaches the teacher. Shapes are
    those of `hard_loss`; T > 0. `labels` are read for `tokens` only, to select the labelled words."""
    teacher, student = teacher.detach().float(), student.float()
    if kind == "score":
        return F.mse_loss(student[:, 0], teacher[:, 0])
    factor = temperature**2
    if kind == "multi":
        soft = (teacher / temperature).sigmoid()
        entropy = F.binary_cross_entropy_with_logits(teacher / temperature, soft)
        return factor * (F.binary_cross_entropy_with_logits(student / temperature, soft) - entropy)
    if kind == "span":
        if mask_BL is not None:
            # Not -inf: the divergence has a term 0 · (inf - inf).
            teacher, student = (
                x.masked_fill(mask_BL[:, :, None] == 0, -1e4) for x in (teacher, student)
            )
        teacher, student = (x.transpose(1, 2).flatten(0, 1) for x in (teacher, student))
    log_q, log_p = (F.log_softmax(x / temperature, -1) for x in (student, teacher))
    if kind == "tokens":
        kl_BL, labelled_BL = (
            F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1),
            labels != IGNORED,
        )
        # A micro-batch may have no labelled word.
        return factor * (kl_BL * labelled_BL).sum() / labelled_BL.sum().clamp(min=1)
    return factor * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
