"""The arguments of PyTorch's attention, for the two places that compute it step by step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, by their names there."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """The number that the products of queries and keys are multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def masked(self, scores: Tensor) -> Tensor:
        """Apply `attn_mask` to the scores of the attention."""
        if self.attn_mask is None:
            return scores
        if self.attn_mask.dtype == torch.bool:
            # The lowest finite number, not -inf, keeps a row without visible tokens finite.
            return scores.masked_fill(~self.attn_mask, torch.finfo(scores.dtype).min)
        return scores + self.attn_mask
