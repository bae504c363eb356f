"""Sparse inference on the CPU: linears of which few weights are left run as CSR × dense, the rest as they are.

The weight [rows, columns] is the sparse factor and the tokens are the columns of the dense one, so that a weight is
read once for many tokens; with the factors the other way round torch is slower than dense. Tokens are taken `TOKENS` at
a time, so that what a row reads stays in the cache. Indices of 32 bits halve what has to be read.

Measured against torch's dense linear, one thread of a processor with AVX-512, MKL, times faster for 128 and 1,024
tokens: 768 → 3072 at 3 % 4.5 and 3.9, at 10 % 2.4 and 2.0, at 50 % 0.6 and 0.2; 3072 → 768 at 3 % 5.3 and 3.5, at 10 %
1.8 and 1.3. All tokens in one piece gain half as much. A whole encoder of BERT-base's widths, 1 and 8 × 128 tokens: at
3 % 3.4 and 3.0, at 10 % 1.9 and 1.5.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.layout import Layout, layout_for
from kdcli.models.matrices import matrices

TOKENS = 64
"""Columns of the dense factor that are computed at a time."""
TRIED_BELOW = 0.35
"""Density up to which the sparse form is timed at all: nowhere has it won beyond."""
GAIN = 1.1
"""How much faster it has to be, for a timing that wavers."""
ROUNDS = 5
ACTIVATIONS = ("intermediate_act_fn", "activation")
"""What the module of a feed-forward block calls its activation, where that is all it applies behind its linear."""
LENGTH = 128
"""Tokens it is timed with."""


class SparseLinear(nn.Module):
    """A linear whose weight is held in CSR; for inference only, neither saved nor copied."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = torch.zeros(self.out_features) if linear.bias is None else linear.bias.detach().clone()
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.csr = _csr(linear.weight.detach())

    def product(self, x_IN: Tensor) -> Tensor:
        """Compute [columns, tokens] → [rows, tokens]."""
        return torch.addmm(self.bias[:, None], self.csr, x_IN)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., columns] → [..., rows]."""
        return _by_tokens(x, self.out_features, self.product)

    def extra_repr(self) -> str:
        kept = self.csr.values().numel() / (self.in_features * self.out_features)
        return f"in_features={self.in_features}, out_features={self.out_features}, density={kept:.3f}"


class SparseFeedForward(nn.Module):
    """Two sparse linears and the activation in between, without turning what is between them around twice."""

    def __init__(self, up: SparseLinear, act: nn.Module, down: SparseLinear) -> None:
        super().__init__()
        self.up, self.act, self.down = up, act, down

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., D] → [..., D]."""
        return _by_tokens(x, self.down.out_features, lambda x_DN: self.down.product(self.act(self.up.product(x_DN))))


def _by_tokens(x: Tensor, rows: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply what works on [columns, tokens] to [..., columns], a few tokens at a time."""
    x_NI = x.reshape(-1, x.shape[-1])
    out_NO = x.new_empty(len(x_NI), rows)
    for at in range(0, len(x_NI), TOKENS):
        # Attention and norms would copy an output that lies transposed, and slower.
        out_NO[at : at + TOKENS].copy_(compute(x_NI[at : at + TOKENS].T.contiguous()).T)
    return out_NO.view(*x.shape[:-1], rows)


def sparsify(model: PreTrainedModel, choose: Callable[[nn.Linear], bool] | None = None) -> PreTrainedModel:
    """A copy of a model whose linears run sparse where that is faster; everything else is shared with the model.

    Args:
        model: on the CPU in float32, its removed weights at zero.
        choose: decides instead of a timing whether a linear runs sparse. Linears of one shape and nearly one density
            (within 5 %) are timed once.

    Returns:
        A model for inference; it cannot be saved or trained.

    Raises:
        UsageError: not float32 on the CPU, or compacted.
    """
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            raise UsageError(f"sparse inference is for float32 on the CPU, not {parameter.dtype} on {parameter.device}")
    if hasattr(model.config, "compact_layers"):
        raise UsageError("a compacted model cannot run sparse", "use the masked model it was made of")
    found = {m.path: m.linear for m in matrices(model)}
    timed: dict[tuple[int, int, int], bool] = {}
    # The copy shares every tensor and has modules of its own.
    small: PreTrainedModel = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for path, linear in found.items():
        if choose is not None:
            sparse = choose(linear)
        else:
            density = int(linear.weight.count_nonzero()) / linear.weight.numel()
            key = (linear.out_features, linear.in_features, round(density * 20))
            if key not in timed:
                timed[key] = faster_sparse(linear)
            sparse = timed[key]
        if sparse:
            small.base_model.set_submodule(path, SparseLinear(linear))
    layout = layout_for(model.config)
    for layer in layout.modules(small.base_model):
        _join(layer, layout)
    return small.eval()


def _join(layer: nn.Module, layout: Layout) -> None:
    """Join the linears of a feed-forward block where both run sparse and nothing but an activation is between them."""
    up, down = layer.get_submodule(layout.up), layer.get_submodule(layout.down)
    block = layout.up.rpartition(".")[0]
    act = {name: module for name, module in layer.get_submodule(block).named_children() if name in ACTIVATIONS}
    if not (isinstance(up, SparseLinear) and isinstance(down, SparseLinear) and act):
        return
    ((name, module),) = act.items()
    layer.set_submodule(layout.down, SparseFeedForward(up, module, down))
    layer.set_submodule(layout.up, nn.Identity())
    layer.set_submodule(f"{block}.{name}", nn.Identity())


def faster_sparse(linear: nn.Linear) -> bool:
    """Whether a linear runs faster sparse than dense here and now, with as many threads as torch has."""
    if int(linear.weight.count_nonzero()) > TRIED_BELOW * linear.weight.numel():
        return False
    sparse, x = SparseLinear(linear), torch.randn(LENGTH, linear.in_features)
    best: dict[nn.Module, float] = {}
    with torch.inference_mode():
        try:
            sparse(x)
        except RuntimeError:
            # A torch without MKL has no such product.
            return False
        linear(x)
        for _ in range(ROUNDS):
            for form in (linear, sparse):
                begin = time.perf_counter()
                form(x)
                best[form] = min(best.get(form, float("inf")), time.perf_counter() - begin)
    return best[linear] > GAIN * best[sparse]


def _csr(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # Torch says that its CSR is new, and that it does not check what it has made itself.
        warnings.simplefilter("ignore")
        wide = weight.to_sparse_csr()
        return torch.sparse_csr_tensor(
            wide.crow_indices().int(), wide.col_indices().int(), wide.values(), weight.shape, check_invariants=False
        )
