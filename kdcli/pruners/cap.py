"""CAP, contrastive pruning (Xu et al. 2022, https://arxiv.org/abs/2112.07198): movement pruning under two teachers.

    L = 0.1 L_CE + 0.9 L_KD + 0.1 L_unsupervised + 10 L_supervised

    L_unsupervised = − mean_i log softmax_j(cos(z_i, p_j) / τ)[i]                          p: the pre-trained model
    L_supervised   = − mean_i mean_{j: y_j = y_i} log softmax_j(cos(z_i, f_j) / τ)[j]      f: the fine-tuned one

over the last layer's first states ([CLS]) of one batch, z those of the pruned model. `DEFAULTS.teacher` weighs CE, KD.
Left out: snapshots of earlier densities and the queue of negatives. Without a fine-tuned model or without classes, the
term that needs them is absent.

Relations: `movement` plus a contrastive loss. Take it with a fine-tuned `teacher` and a wide micro-batch: rows are
the negatives. Each step costs a further forward pass of the pre-trained model.

    method: cap
    teacher: runs/finetuned
"""

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from kdcli.pruners import movement
from kdcli.pruners.pruner import WEIGHT_LR, Defaults, Pruner

DEFAULTS = Defaults(lr=WEIGHT_LR, teacher=0.9)

PRETRAINED, FINETUNED = "pretrained", "finetuned"  # Keys of the states that `contrast` compares with


class Settings(movement.Settings):
    """Keys of the recipe's `pruner:` section under `method: cap`."""

    unsupervised: float = Field(0.1, ge=0)
    supervised: float = Field(10.0, ge=0)
    contrast_temperature: float = Field(0.1, gt=0)


def pruner(settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float) -> Pruner:
    """Put masks on a model; arguments as in `kdcli.pruners.movement`. The command calls `contrast`."""
    built, tau = movement.pruner(settings, model, density=density, steps=steps, lr=lr), settings.contrast_temperature

    def contrast(cls_BD: Tensor, others: Mapping[str, Tensor], labels_B: Tensor | None) -> dict[str, Tensor]:
        """Weighted terms of one batch, from first states of the pruned model and the others, and int64 classes."""
        terms = {}
        if PRETRAINED in others and settings.unsupervised:
            own = torch.eye(len(cls_BD), dtype=torch.bool, device=cls_BD.device)
            terms["unsupervised"] = settings.unsupervised * contrastive(cls_BD, others[PRETRAINED], own, tau)
        if FINETUNED in others and labels_B is not None and settings.supervised:
            alike = labels_B[:, None] == labels_B
            terms["supervised"] = settings.supervised * contrastive(cls_BD, others[FINETUNED], alike, tau)
        return terms

    built.contrast = contrast
    return built


def contrastive(z_BD: Tensor, other_BD: Tensor, alike: Tensor, temperature: float) -> Tensor:
    """InfoNCE from one model's states to another's, which get no gradient; a mean over rows, in float32. `alike`: [B,
    B] bool, which states of the other are positives of a row: at least its own."""
    other_BD = F.normalize(other_BD.detach().float(), dim=-1)
    log_p = (F.normalize(z_BD.float(), dim=-1) @ other_BD.T / temperature).log_softmax(-1)
    return -(log_p * alike).sum(-1).div(alike.sum(-1)).mean()
