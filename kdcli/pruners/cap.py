"""CAP, contrastive pruning (Xu et al. 2022, https://arxiv.org/abs/2112.07198): movement pruning under two teachers.

    L = 0.1 L_CE + 0.9 L_KD + 0.1 L_unsupervised + 10 L_supervised

    L_unsupervised = − mean_i log softmax_j(cos(z_i, p_j) / τ)[i]                          p: the pre-trained model
    L_supervised   = − mean_i mean_{j: y_j = y_i} log softmax_j(cos(z_i, f_j) / τ)[j]      f: the fine-tuned one

over the last layer's first states ([CLS]) of one batch, z those of the pruned model. `DEFAULTS.teacher` weighs CE, KD.
Left out: snapshots of earlier densities and the queue of negatives. Without a fine-tuned model or without classes, the
term that needs them is absent.

Relations: `movement` plus a contrastive loss. Take it with a fine-tuned `teacher` and a wide batch: its rows are the
negatives, whatever the micro-batch. Each step costs a further forward pass of the pre-trained and the fine-tuned model.

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

PRETRAINED, FINETUNED, CLASSES = (
    "pretrained",
    "finetuned",
    "classes",
)  # Keys of what `contrast` compares with


class Settings(movement.Settings):
    """Keys of the recipe's `pruner:` section under `method: cap`."""

    unsupervised: float = Field(0.1, ge=0)
    supervised: float = Field(10.0, ge=0)
    contrast_temperature: float = Field(0.1, gt=0)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model; arguments as in `kdcli.pruners.movement`. The command calls `contrast`."""
    built, tau = (
        movement.pruner(settings, model, density=density, steps=steps, lr=lr),
        settings.contrast_temperature,
    )

    def contrast(cls_BD: Tensor, own_B: Tensor, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weighted terms of some rows, from their first states; `own_B` are their places in `whole`: first states
        [E, D] of the others, and int64 classes [E] if there are any, of all E rows of the batch."""
        terms = {}
        if PRETRAINED in whole and settings.unsupervised:
            itself_BE = own_B[:, None] == torch.arange(len(whole[PRETRAINED]), device=own_B.device)
            terms["unsupervised"] = settings.unsupervised * contrastive(
                cls_BD, whole[PRETRAINED], itself_BE, tau
            )
        if FINETUNED in whole and CLASSES in whole and settings.supervised:
            alike_BE = whole[CLASSES][own_B][:, None] == whole[CLASSES]
            terms["supervised"] = settings.supervised * contrastive(
                cls_BD, whole[FINETUNED], alike_BE, tau
            )
        return terms

    built.contrast = contrast
    return built


def contrastive(z_BD: Tensor, other_ED: Tensor, alike_BE: Tensor, temperature: float) -> Tensor:
    """InfoNCE from one model's states to E states of another, which get no gradient; a mean over B rows, in float32.
    `alike_BE`: bool, which states of the other are positives of a row: at least its own."""
    other_ED = F.normalize(other_ED.detach().float(), dim=-1)
    log_p_BE = (F.normalize(z_BD.float(), dim=-1) @ other_ED.T / temperature).log_softmax(-1)
    return -(log_p_BE * alike_BE).sum(-1).div(alike_BE.sum(-1)).mean()
