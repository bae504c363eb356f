"""Masks for tiny models: random ones, and ones with empty rows, columns and heads as pruning leaves
them."""

import torch
from transformers import PreTrainedModel

from kdcli.deploy.sparse.mask_file import MaskInfo, base_facts
from kdcli.models.matrices import matrices


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """A fresh model has no biases, and folding them would show nothing."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def random_masks(model: PreTrainedModel, density: float, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {m.name: torch.rand(m.shape, generator=drawn) < density for m in matrices(model)}


def structured_masks(model: PreTrainedModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """A third of the weights in half of the rows and most columns; the first head of layer 2 writes
    nothing."""
    drawn = torch.Generator().manual_seed(seed)
    masks = random_masks(model, 0.33, seed)
    for mask in masks.values():
        mask &= torch.rand(len(mask), 1, generator=drawn) < 0.5
        mask &= torch.rand(1, mask.shape[1], generator=drawn) < 0.8
    masks["2.O"][:, :8] = False
    return masks


def info_for(model: PreTrainedModel, **more: object) -> MaskInfo:
    return MaskInfo(**base_facts(model, "base"), method="smp", density=0.33, **more)
