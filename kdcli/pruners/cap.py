"""CAP, contrastive pruning: movement pruning under two teachers.

Xu et al. 2022, https://arxiv.org/abs/2112.07198:

    L = 0.1 L_CE + 0.9 L_KD + 0.1 L_unsupervised + 10 L_supervised

    L_unsupervised = − mean_i log softmax_j(cos(z_i, p_j) / τ)[i]
    L_supervised   = − mean_i mean_{j: y_j = y_i} log softmax_j(cos(z_i, f_j) / τ)[j]

z, p and f are the last layer's states of the first token ([CLS]) of one batch, in the pruned, the
pre-trained and the fine-tuned model. `DEFAULTS.teacher` sets the weights of CE and KD. Not
implemented: snapshots of earlier densities and the queue of negatives. A term whose model or
classes are missing is skipped.

When to use: there is a fine-tuned `teacher` and the batch is large; all of its rows serve as
negatives, whatever the size of the micro-batches. Prefer `movement` if time matters: CAP needs an
additional forward pass of the pre-trained and of the fine-tuned model in each step.

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

# Keys of the tensors that `contrast` compares with.
PRETRAINED = "pretrained"
FINETUNED_GRADIENT = "finetuned"
CLASSES = "classes"


class Settings(movement.Settings):
    """Keys of the recipe's `pruner:` section under `method: cap`."""

    unsupervised: float = Field(0.1, ge=0)
    supervised: float = Field(10.0, ge=0)
    contrast_temperature: float = Field(0.1, gt=0)


def pruner(
    settings: Settings, model: PreTrainedModel, *, density: float, steps: int, lr: float
) -> Pruner:
    """Put masks on a model, and provide `contrast`.

    Args:
        settings: The recipe's settings.
        model: The model, which is changed in place.
        density: Share of the weights that the final masks keep.
        steps: Number of steps of the run.
        lr: The schedule's learning rate, which applies to the weights.

    Raises UsageError if the model type is unknown.
    """
    masked = movement.pruner(settings, model, density=density, steps=steps, lr=lr)
    tau = settings.contrast_temperature

    def contrast(
        cls_BD: Tensor, own_B: Tensor, batch_states: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Compute the weighted contrastive terms of B rows in a batch of E rows.

        Args:
            cls_BD: The pruned model's states of the first token.
            own_B: Indices of the B rows in the batch.
            batch_states: The other models' states of the first token [E, D] for all rows and, if
                there are classes, their int64 classes [E].
        """
        terms = {}
        if PRETRAINED in batch_states and settings.unsupervised:
            itself_BE = own_B[:, None] == torch.arange(
                len(batch_states[PRETRAINED]), device=own_B.device
            )
            terms["unsupervised"] = settings.unsupervised * contrastive(
                cls_BD, batch_states[PRETRAINED], itself_BE, tau
            )
        if FINETUNED_GRADIENT in batch_states and CLASSES in batch_states and settings.supervised:
            same_class_BE = batch_states[CLASSES][own_B][:, None] == batch_states[CLASSES]
            terms["supervised"] = settings.supervised * contrastive(
                cls_BD, batch_states[FINETUNED_GRADIENT], same_class_BE, tau
            )
        return terms

    masked.contrast = contrast
    return masked


def contrastive(z_BD: Tensor, other_ED: Tensor, positive_BE: Tensor, temperature: float) -> Tensor:
    """Compute InfoNCE from one model's states to another model's, a mean over B rows, in float32.

    No gradient reaches the other model's E states. `positive_BE` is True for a row's positives,
    which include at least its own state in the other model.
    """
    other_ED = F.normalize(other_ED.detach().float(), dim=-1)
    log_p_BE = (F.normalize(z_BD.float(), dim=-1) @ other_ED.T / temperature).log_softmax(-1)
    return -(log_p_BE * positive_BE).sum(-1).div(positive_BE.sum(-1)).mean()
