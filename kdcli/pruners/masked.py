"""Masks inside a model: a parametrization of each linear layer whose matrices are pruned.

    W' = W ⊙ M            forward pass, in W's dtype
    ∂L/∂S = W ⊙ ∂L/∂W'    straight through the masking function, for kept and removed weights
    ∂L/∂W = M ⊙ ∂L/∂W'    if W is trained

M is a function of the trained tensors. A checkpoint therefore holds only weights and scores, and
choosing again restores the masks.
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
    """A linear layer's weight [out, in] under a mask.

    The scores are float32 and start at `start`. There are none if `start` is None.

    Attributes:
        mask: [out, in] bool, True for kept weights. At first, all weights are kept.
        share: [out, 1] float32, the weight of each element of a row in the mean over matrices of
            the mean over elements.
    """

    mask: Tensor
    share: Tensor

    def __init__(self, weight: Tensor, start: float | None = 0.0) -> None:
        super().__init__()
        self.score: nn.Parameter | None = None
        if start is not None:
            self.score = nn.Parameter(torch.full_like(weight, start, dtype=torch.float32))
        mask = torch.ones_like(weight, dtype=torch.bool)
        share = weight.new_zeros(len(weight), 1, dtype=torch.float32)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("share", share, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        apply: Any = _StraightThrough.apply
        masked: Tensor = apply(weight, self.score, self.mask)
        return masked


class _StraightThrough(torch.autograd.Function):
    """W ⊙ M with a gradient to the scores. It saves only W and M for the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, score: Tensor | None, mask: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, mask = ctx.saved_tensors
        to_score = None
        if ctx.needs_input_grad[1] and gradient.dtype == torch.float32:
            to_score = gradient * weight
        elif ctx.needs_input_grad[1]:
            # Convert before multiplying: half precision would round small products to zero.
            to_score = gradient.float().mul_(weight)
        to_weight = gradient * mask if ctx.needs_input_grad[0] else None
        return to_weight, to_score, None


class _MeanSigmoid(torch.autograd.Function):
    """Σ share · σ(S − shift), which saves only S.

    The sigmoid is cheaper to recompute than to store.
    """

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
    """The masked matrices of a model, by name (`3.Q`). Fused linear layers are split into matrices.

    Attributes:
        matrices: The matrices, in the model's order.
        kinds: Matrix name -> kind.
        held: Path of a linear layer -> its masked weight.
    """

    def __init__(self, masked: list[Matrix]) -> None:
        self.matrices = masked
        self.kinds = {m.name: m.kind for m in masked}
        self._linears: dict[str, Any] = {m.path: m.linear for m in masked}
        self.held: dict[str, MaskedWeight] = {
            path: linear.parametrizations.weight[0] for path, linear in self._linears.items()
        }

    def scores(self) -> dict[str, Tensor]:
        """Return name -> scores [rows, in], float32 and detached. Empty if there are no scores."""
        scores: dict[str, Tensor] = {}
        for matrix in self.matrices:
            score = self.held[matrix.path].score
            if score is None:
                return {}
            scores[matrix.name] = matrix.of(score.detach())
        return scores

    def weights(self) -> dict[str, Tensor]:
        """Return name -> weights before masking [rows, in], detached."""
        weights: dict[str, Tensor] = {}
        for matrix in self.matrices:
            original = self._linears[matrix.path].parametrizations.weight.original
            weights[matrix.name] = matrix.of(original.detach())
        return weights

    def masks(self) -> dict[str, Tensor]:
        """Return name -> mask [rows, in], bool, True for kept weights."""
        return {m.name: m.of(self.held[m.path].mask) for m in self.matrices}

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Set masks by name, from the next forward pass on. Other matrices keep their masks."""
        for matrix in self.matrices:
            if matrix.name in masks:
                mask = self.held[matrix.path].mask
                mask[matrix.rows_on(mask.device)] = masks[matrix.name].to(mask.device)

    def kept(self) -> dict[str, int]:
        """Return name -> number of kept weights."""
        return {name: int(mask.count_nonzero()) for name, mask in self.masks().items()}

    def density(self) -> float:
        """Return the share of all weights that is kept."""
        return sum(self.kept().values()) / sum(m.numel for m in self.matrices)

    def mean_sigmoid(self, shift: float = 0.0) -> Tensor:
        """Return R(S), a scalar: the mean over matrices of mean σ(S − shift).

        It has a gradient to the scores.
        """
        apply: Any = _MeanSigmoid.apply
        parts = [apply(held.score, held.share, shift) for held in self.held.values()]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def fold(self) -> None:
        """Write the masked weights into the linear layers, and remove masks and scores.

        Afterwards, the model is a stock model again.
        """
        for path, linear in self._linears.items():
            self.held[path].eval()
            masked = linear.weight.clone()
            original = linear.parametrizations.weight.original
            # Do not use torch's removal: it deletes the property from a class that copies of the
            # model share.
            linear.__class__ = parametrize.type_before_parametrizations(linear)
            del linear.parametrizations
            linear.register_parameter("weight", original)
            # A mask turns a negative weight into -0.0.
            original.copy_(masked.masked_fill_(masked == 0, 0.0))


def attach(
    model: PreTrainedModel,
    *,
    start: float | None = 0.0,
    frozen: bool = False,
    embeddings: str = "trained",
    kind: type[MaskedWeight] = MaskedWeight,
) -> Masks:
    """Put a mask that keeps everything on each matrix of `kdcli.models.matrices`.

    Args:
        model: The model, which is changed in place.
        start: Initial value of the scores, or None for no scores.
        frozen: Whether to freeze all weights, so that only the scores are trained.
        embeddings: `frozen`, as in the code of movement pruning's authors, or `trained`.
        kind: The class that computes the masked weight.

    Raises UsageError if the model type is unknown, and ValueError if the model already has masks.
    """
    pruned = matrices(model)
    if frozen:
        model.requires_grad_(False)
    if embeddings == "frozen":
        for name, parameter in model.base_model.named_parameters():
            if name.startswith(layout_for(model.config).embeddings):
                parameter.requires_grad_(False)
    for linear in {id(m.linear): m.linear for m in pruned}.values():
        if parametrize.is_parametrized(linear):
            raise ValueError("the model already has masks")
        parametrize.register_parametrization(linear, "weight", kind(linear.weight, start))
    masks = Masks(pruned)
    for matrix in pruned:
        share = masks.held[matrix.path].share
        share[matrix.rows_on(model.device)] = 1 / (matrix.numel * len(pruned))
    return masks


def is_score(name: str) -> bool:
    """Return whether a parameter holds scores, given its name."""
    return name.endswith(".parametrizations.weight.0.score")
