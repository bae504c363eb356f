"""Masks inside a model: a parametrisation of each linear whose matrices are pruned.

    W' = W ⊙ M            forward, in W's type
    ∂L/∂S = W ⊙ ∂L/∂W'    straight through the masking function: of kept and of removed weights
    ∂L/∂W = M ⊙ ∂L/∂W'    where W is trained

M was chosen after the last step and is only stored here, as it is a function of what is trained: a checkpoint holds
weights and scores, and choosing again restores the masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from kdcli.models.matrices import Matrix, matrices


class MaskedWeight(nn.Module):
    """A linear's weight under a mask; float32 scores beside it, whatever the type of the weight.

    Args:
        weight: [out, in].
        start: what the scores begin with; None for a method without scores.

    Attributes:
        score: what is learned, shaped as the weight.
        mask: which weights are kept; all, until something was chosen.
        share: [out, 1] float32, what each weight of a row counts in the mean over matrices of a matrix's mean.
    """

    mask: Tensor
    share: Tensor

    def __init__(self, weight: Tensor, start: float | None = 0.0) -> None:
        super().__init__()
        scores = None if start is None else torch.full_like(weight, start, dtype=torch.float32)
        self.register_parameter("score", None if scores is None else nn.Parameter(scores))
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.bool), persistent=False)
        self.register_buffer("share", weight.new_zeros(len(weight), 1, dtype=torch.float32), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The masked weight."""
        masked: Tensor = _StraightThrough.apply(weight, self.score, self.mask)  # type: ignore[no-untyped-call]
        return masked


class _StraightThrough(torch.autograd.Function):
    """W ⊙ M with a gradient to the scores; keeps no tensor but W and M."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, score: Tensor | None, mask: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, mask = ctx.saved_tensors
        (gradient,) = gradients
        of_weight = gradient * mask if ctx.needs_input_grad[0] else None
        of_score = None
        if ctx.needs_input_grad[1]:
            # In float32 before the product: half types would round it, and small ones to zero.
            of_score = gradient * weight if gradient.dtype == torch.float32 else gradient.float().mul_(weight)
        return of_weight, of_score, None


class _MeanSigmoid(torch.autograd.Function):
    """Σ share · σ(S − shift); keeps no tensor but S, whose sigmoid is cheaper to compute again than to hold."""

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
    """The masked matrices of a model, by name (`3.Q`), fused linears taken apart.

    Attributes:
        matrices: in the order of the layers.
        kinds: name → Q, K, V, O, U, D, …
    """

    def __init__(self, model: PreTrainedModel, found: list[Matrix]) -> None:
        self.model = model
        self.matrices = found
        self.kinds = {m.name: m.kind for m in found}
        self._linears = {m.path: m.linear for m in found}

    def _masked(self, path: str) -> MaskedWeight:
        held: Any = self._linears[path].parametrizations
        parametrisation: MaskedWeight = held.weight[0]
        return parametrisation

    def parametrisations(self) -> dict[str, MaskedWeight]:
        """Path of each linear → its parametrisation."""
        return {path: self._masked(path) for path in self._linears}

    def of_path(self, path: str) -> list[Matrix]:
        """The matrices that one linear holds."""
        return [m for m in self.matrices if m.path == path]

    def scores(self) -> dict[str, Tensor]:
        """Name → scores [rows, in], float32, detached; empty where a method learns none."""
        learned: dict[str, Any] = {path: p.score for path, p in self.parametrisations().items()}
        if None in learned.values():
            return {}
        return {m.name: m.of(learned[m.path].detach()) for m in self.matrices}

    def weights(self) -> dict[str, Tensor]:
        """Name → the weights under the mask [rows, in], detached: also those that the mask removes."""
        held: dict[str, Any] = {path: linear.parametrizations for path, linear in self._linears.items()}
        return {m.name: m.of(held[m.path].weight.original.detach()) for m in self.matrices}

    def masks(self) -> dict[str, Tensor]:
        """Name → what is kept [rows, in], bool."""
        return {m.name: m.of(self._masked(m.path).mask) for m in self.matrices}

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Keep what these say, from the next forward pass on; matrices without one stay as they are."""
        for matrix in self.matrices:
            if matrix.name in masks:
                held = self._masked(matrix.path).mask
                held[slice(None) if matrix.rows is None else matrix.rows] = masks[matrix.name].to(held.device)

    def kept(self) -> dict[str, int]:
        """Name → number of weights that are kept."""
        return {name: int(mask.count_nonzero()) for name, mask in self.masks().items()}

    def densities(self) -> dict[str, float]:
        """Name → share of the weights that is kept."""
        return {m.name: kept / m.numel for m, kept in zip(self.matrices, self.kept().values(), strict=True)}

    def density(self) -> float:
        """Share of all weights that is kept."""
        return sum(self.kept().values()) / sum(m.numel for m in self.matrices)

    def mean_sigmoid(self, shift: float = 0.0) -> Tensor:
        """R(S): mean over the matrices of mean σ(S − shift), a scalar with a gradient to the scores; 0.5 for S = 0.

        The form that the weights of published runs belong to: as a plain sum it would be millions of times larger.
        """
        parts = [_MeanSigmoid.apply(p.score, p.share, shift) for p in self.parametrisations().values()]  # type: ignore[no-untyped-call]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def fold(self) -> None:
        """Write the masked weights into the linears and remove masks and scores: the model is a stock one again."""
        for path, linear in self._linears.items():
            self._masked(path).eval()
            baked = linear.weight.clone()
            held: Any = linear.parametrizations
            original = held.weight.original
            # Not by torch's own removal: it takes the property off a class that copies of the model share.
            linear.__class__ = parametrize.type_before_parametrizations(linear)
            del linear.parametrizations
            linear.register_parameter("weight", original)
            # A removed negative weight is -0.0 under a mask.
            original.copy_(baked.masked_fill_(baked == 0, 0.0))


def attach(
    model: PreTrainedModel, *, start: float | None = 0.0, frozen: bool = False, kind: type[MaskedWeight] = MaskedWeight
) -> Masks:
    """Put a mask that keeps everything on each matrix of `kdcli.models.matrices`.

    Cast the model before, not after: scores stay float32.

    Args:
        start: what the scores begin with; None for none.
        frozen: nothing the model has is trained, only the scores.
        kind: what computes the masked weight.

    Raises:
        UsageError: a model type without a row in `kdcli.models.layout`.
        ValueError: the model has masks already.
    """
    found = matrices(model)
    if frozen:
        model.requires_grad_(False)
    for linear in {id(m.linear): m.linear for m in found}.values():
        if parametrize.is_parametrized(linear):
            raise ValueError("the model has masks already")
        parametrize.register_parametrization(linear, "weight", kind(linear.weight, start))
    masks = Masks(model, found)
    for path, parametrisation in masks.parametrisations().items():
        for matrix in masks.of_path(path):
            rows = slice(None) if matrix.rows is None else matrix.rows
            parametrisation.share[rows] = 1 / (matrix.numel * len(found))
    return masks


def is_score(name: str) -> bool:
    """Whether a parameter's name is that of scores."""
    return name.endswith(".parametrizations.weight.0.score")
