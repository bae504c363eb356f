"""Masks inside a model: a parametrization of each linear whose matrices are pruned.

    W' = W ⊙ M            forward, in W's dtype
    ∂L/∂S = W ⊙ ∂L/∂W'    straight through the masking function: of kept and of removed weights
    ∂L/∂W = M ⊙ ∂L/∂W'    where W is trained

M is a function of what is trained, so a checkpoint holds only weights and scores: choosing again restores the masks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from kdcli.models.layout import layout_for
from kdcli.models.matrices import Matrix, matrices


class MaskedWeight(nn.Module):
    """A linear's weight [out, in] under a mask, with float32 scores that begin at `start`, or None."""

    mask: Tensor  # [out, in] bool, True is kept; all at first
    share: Tensor  # [out, 1] float32, what an element of the row counts in the mean over matrices of a matrix's mean

    def __init__(self, weight: Tensor, start: float | None = 0.0) -> None:
        super().__init__()
        self.score = (
            None
            if start is None
            else nn.Parameter(torch.full_like(weight, start, dtype=torch.float32))
        )
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.bool), persistent=False)
        self.register_buffer(
            "share", weight.new_zeros(len(weight), 1, dtype=torch.float32), persistent=False
        )

    def forward(self, weight: Tensor) -> Tensor:
        masked: Tensor = _StraightThrough.apply(weight, self.score, self.mask)  # type: ignore[no-untyped-call]
        return masked


class _StraightThrough(torch.autograd.Function):
    """W ⊙ M with a gradient to the scores; saves no tensor but W and M."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, score: Tensor | None, mask: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, mask = ctx.saved_tensors
        to_score = None
        if ctx.needs_input_grad[1]:
            # Float32 before the product: half precision would round it, and small values to zero.
            to_score = (
                gradient * weight
                if gradient.dtype == torch.float32
                else gradient.float().mul_(weight)
            )
        return gradient * mask if ctx.needs_input_grad[0] else None, to_score, None


class _MeanSigmoid(torch.autograd.Function):
    """Σ share · σ(S − shift); saves no tensor but S, as its sigmoid is cheaper to recompute than to store."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, share: Tensor, shift: float) -> Tensor:
        ctx.save_for_backward(score, share)
        ctx.shift = shift
        return (score.sub(shift).sigmoid_().sum(1, keepdim=True) * share).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        score, share = ctx.saved_tensors
        sigmoid = score.sub(ctx.shift).sigmoid_()
        return sigmoid.addcmul_(sigmoid, sigmoid, value=-1).mul_(share * gradients[0]), None, None


class Masks:
    """The masked matrices of a model, by name (`3.Q`), fused linears taken apart."""

    def __init__(self, masked: list[Matrix]) -> None:
        self.matrices = masked
        self.kinds = {m.name: m.kind for m in masked}
        self._linears: dict[str, Any] = {
            m.path: m.linear for m in masked
        }  # by path, as their parametrizations:
        self.held: dict[str, MaskedWeight] = {
            p: li.parametrizations.weight[0] for p, li in self._linears.items()
        }

    def scores(self) -> dict[str, Tensor]:
        """Name -> scores [rows, in], float32, detached; empty where a method learns none."""
        scores: dict[str, Any] = {path: held.score for path, held in self.held.items()}
        return (
            {}
            if None in scores.values()
            else {m.name: m.of(scores[m.path].detach()) for m in self.matrices}
        )

    def weights(self) -> dict[str, Tensor]:
        """Name -> weights before masking [rows, in], detached."""
        return {
            m.name: m.of(self._linears[m.path].parametrizations.weight.original.detach())
            for m in self.matrices
        }

    def masks(self) -> dict[str, Tensor]:
        """Name -> what is kept [rows, in], bool."""
        return {m.name: m.of(self.held[m.path].mask) for m in self.matrices}

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Set masks by name, from the next forward pass on; the other matrices stay as they are."""
        for matrix in self.matrices:
            if matrix.name in masks:
                mask = self.held[matrix.path].mask
                mask[matrix.rows_on(mask.device)] = masks[matrix.name].to(mask.device)

    def kept(self) -> dict[str, int]:
        """Name -> number of weights that are kept."""
        return {name: int(mask.count_nonzero()) for name, mask in self.masks().items()}

    def density(self) -> float:
        """Share of all weights that is kept."""
        return sum(self.kept().values()) / sum(m.numel for m in self.matrices)

    def mean_sigmoid(self, shift: float = 0.0) -> Tensor:
        """R(S): mean over the matrices of mean σ(S − shift), a scalar with a gradient to the scores."""
        parts = [_MeanSigmoid.apply(h.score, h.share, shift) for h in self.held.values()]  # type: ignore[no-untyped-call]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def fold(self) -> None:
        """Write the masked weights into the linears and remove masks and scores: the model is a stock one again."""
        for path, linear in self._linears.items():
            self.held[path].eval()
            masked = linear.weight.clone()
            original = linear.parametrizations.weight.original
            # Torch's own removal deletes the property from a class that copies of the model share.
            linear.__class__ = parametrize.type_before_parametrizations(linear)
            del linear.parametrizations
            linear.register_parameter("weight", original)
            # Under a mask a removed negative weight is -0.0.
            original.copy_(masked.masked_fill_(masked == 0, 0.0))


def attach(
    model: PreTrainedModel,
    *,
    start: float | None = 0.0,
    frozen: bool = False,
    embeddings: str = "trained",
    kind: type[MaskedWeight] = MaskedWeight,
) -> Masks:
    """Put a mask that keeps everything on each matrix of `kdcli.models.matrices`. `start`: initial value of the scores;
    None for none. `frozen`: only the scores are trained. `embeddings`: `frozen`, as in the code of movement pruning's
    authors, or `trained`. `kind`: computes the masked weight. Raises UsageError: an unknown model type. Raises
    ValueError: the model has masks already."""
    found = matrices(model)
    if frozen:
        model.requires_grad_(False)
    if embeddings == "frozen":
        for name, parameter in model.base_model.named_parameters():
            if name.startswith(layout_for(model.config).embeddings):
                parameter.requires_grad_(False)
    for linear in {id(m.linear): m.linear for m in found}.values():
        if parametrize.is_parametrized(linear):
            raise ValueError("the model has masks already")
        parametrize.register_parametrization(linear, "weight", kind(linear.weight, start))
    masks = Masks(found)
    for matrix in found:
        masks.held[matrix.path].share[matrix.rows_on(model.device)] = 1 / (
            matrix.numel * len(found)
        )
    return masks


def is_score(name: str) -> bool:
    """Whether a parameter's name is that of scores."""
    return name.endswith(".parametrizations.weight.0.score")
