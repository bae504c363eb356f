"""Soft targets: a teacher's logits as labels.

Hinton et al. 2015, https://arxiv.org/abs/1503.02531, §2:

    L = T² · KL(softmax(z_T / T) ‖ softmax(z_S / T))

T² keeps the size of the gradient when the temperature rises. Regression scores use the squared
error, because the divergence of a single logit is always 0. Multi-label tasks use the divergence of
each binary decision.

When to use: first, on a task. Every distillation on a task has this loss, and this method adds
nothing to it. Prefer `pkd` to add hidden states, and `tinybert` to add a stage before it.

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
    """Soft targets have no settings in `loss:`. The weight and the temperature are in `kd:`."""


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build an objective without terms: training on the task adds labels and soft targets."""
    return Objective(Needs(), Needs(), nn.ModuleDict(), terms=lambda t, s: {}, over={})


def soft_loss(
    kind: Kind,
    teacher: Tensor,
    student: Tensor,
    labels: Tensor,
    mask_BL: Tensor | None,
    temperature: float,
) -> Tensor:
    """Compute the loss against a teacher's logits.

    It is a float32 scalar and a mean over what `kdcli.losses.hard.mean_over` names. No gradient
    reaches the teacher.

    Args:
        kind: The kind of task.
        teacher, student: Logits, with the shapes that `kdcli.losses.hard.hard_loss` takes.
        labels: Read for `tokens` only, to select the labelled words.
        mask_BL: 1 for real tokens.
        temperature: T > 0.
    """
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
            # With -inf, the divergence would have a term 0 · (inf - inf).
            padding_BL1 = mask_BL[:, :, None] == 0
            teacher = teacher.masked_fill(padding_BL1, -1e4)
            student = student.masked_fill(padding_BL1, -1e4)
        teacher, student = (x.transpose(1, 2).flatten(0, 1) for x in (teacher, student))
    log_q, log_p = (F.log_softmax(x / temperature, -1) for x in (student, teacher))
    if kind == "tokens":
        kl_BL = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        labelled_BL = labels != IGNORED
        # A micro-batch may have no labelled word.
        return factor * (kl_BL * labelled_BL).sum() / labelled_BL.sum().clamp(min=1)
    return factor * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
