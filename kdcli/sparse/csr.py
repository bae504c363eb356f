"""Sparse inference on the CPU: linears of which few weights are left run as CSR × dense, the rest as they are.

The weight [rows, columns] is the sparse factor and the tokens are the columns of the dense one, so that a weight is
read once for many tokens; with the factors the other way round torch is slower than dense. Tokens are taken `TOKENS` at
a time, so that what a row reads stays in the cache. Indices of 32 bits halve what has to be read.

The product alone is five to eight times as fast as a dense linear at 3 % of the weights and twice at 10 %, but turning
what goes in and comes out (a nanosecond an element in torch) eats half of that. So linears that follow each other are
joined, and what is between them is never turned: two turns for the four linears of attention, two for a feed-forward
block. Measured: docs/results.md, Pruning.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.custom_class import COMPACT
from kdcli.models.layout import PATHS, Layout, layout_for, linears
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

    def product(self, x_IN: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute [columns, tokens] → [rows, tokens]."""
        return torch.addmm(self.bias[:, None], self.csr, x_IN, out=out)

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


class SparseAttention(nn.Module):
    """Self-attention and the linear behind it, all four sparse: only what enters and what leaves is turned around.

    The dense products of attention read a factor turned or not at the same speed, so that queries, keys, values and
    what is mixed of them stay as sparse products write and read them.
    """

    def __init__(self, parts: Mapping[str, SparseLinear], heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (parts[letter] for letter in "QKVO")
        self.heads, self.scale = heads, (self.q.out_features // heads) ** -0.5

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **ignored: Any
    ) -> tuple[Tensor, None]:
        """Attend within `attention_mask`: True where a token may look, or what is added to the scores."""
        batch, length, width = hidden_states.shape
        out_BLO = hidden_states.new_empty(batch, length, self.o.out_features)
        # Nothing is added without a mask, see `_rows`.
        mask_BALL = out_BLO.new_zeros(batch, 1, 1, 1)
        if attention_mask is not None:
            mask_BALL = attention_mask.expand(batch, -1, -1, -1)
            if mask_BALL.dtype == torch.bool:
                lowest = torch.finfo(out_BLO.dtype).min
                mask_BALL = torch.zeros_like(mask_BALL, dtype=out_BLO.dtype).masked_fill_(~mask_BALL, lowest)
        # As many rows at once as fill a product.
        several = max(1, TOKENS // max(1, length))
        for at in range(0, batch, several):
            rows = slice(at, at + several)
            self._rows(hidden_states[rows].reshape(-1, width), mask_BALL[rows], out_BLO[rows].flatten(0, 1))
        return out_BLO, None

    def _rows(self, x_NI: Tensor, mask_BALL: Tensor, out_NO: Tensor) -> None:
        """Attend in a few rows of one length, and write what O makes of it."""
        pieces = [slice(at, at + TOKENS) for at in range(0, len(x_NI), TOKENS)]
        qkv_DN = [x_NI.new_empty(part.out_features, len(x_NI)) for part in (self.q, self.k, self.v)]
        for piece in pieces:
            x_IN = x_NI[piece].T.contiguous()
            for part, into_DN in zip((self.q, self.k, self.v), qkv_DN, strict=True):
                part.product(x_IN, out=into_DN[:, piece])
        length = len(x_NI) // len(mask_BALL)
        mixed = []
        for row, mask_ALL in enumerate(mask_BALL):
            here = slice(row * length, (row + 1) * length)
            q_AKL, k_AKL, v_AKL = (x[:, here].view(self.heads, -1, length) for x in qkv_DN)
            scores_ALL = torch.baddbmm(mask_ALL, q_AKL.transpose(1, 2), k_AKL, alpha=self.scale)
            mixed.append(torch.bmm(v_AKL, scores_ALL.softmax(-1).transpose(1, 2)).flatten(0, 1))
        mixed_DN = torch.cat(mixed, 1)
        for piece in pieces:
            out_NO[piece].copy_(self.o.product(mixed_DN[:, piece]).T)


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
    if hasattr(model.config, COMPACT):
        raise UsageError("a compacted model cannot run sparse", "use the masked model it was made of")
    # The copy shares every tensor and has modules of its own.
    small: PreTrainedModel = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    layout, timed = layout_for(model.config), _Timed()
    layers = {id(layer): layer for layer in layout.modules(small.base_model)}.values()
    blocks = [block for layer in layers for block in _blocks(layer, layout, str(model.config.model_type))]
    for path, linear in {m.path: m.linear for m in matrices(small)}.items():
        if choose(linear) if choose else timed.linear(linear):
            small.base_model.set_submodule(path, SparseLinear(linear))
    for block in blocks:
        if all(map(choose, block.linears)) if choose else timed.block(block):
            block.install(block.joined())
    return small.eval()


@dataclass(frozen=True)
class _Block:
    """Linears of a layer that gain from running sparse together.

    Attributes:
        linears: as they were, dense.
        now: what the layer makes of [1, L, D] with them, each in the form it has by itself.
        joined: makes the module that does the same at once.
        install: puts that module into the layer.
    """

    linears: tuple[nn.Linear, ...]
    now: Callable[[Tensor], Tensor]
    joined: Callable[[], nn.Module]
    install: Callable[[nn.Module], None]


def _blocks(layer: nn.Module, layout: Layout, kind: str) -> list[_Block]:
    """The blocks of a layer whose linears can be joined."""
    found: list[_Block] = []
    of = {letter: of_letter[0][0] for letter, of_letter in linears(layout, layer).items()}
    inside = layout.up.rpartition(".")[0]
    act = {name: module for name, module in layer.get_submodule(inside).named_children() if name in ACTIVATIONS}
    # Nothing but the activation may be between the two.
    if act and layout.gate is None:
        found.append(_feed_forward(layer, layout, of, *act.popitem()))
    if kind in PATHS:
        found.append(_attention(layer, layout, of, *PATHS[kind][:2]))
    return found


def _feed_forward(layer: nn.Module, layout: Layout, of: dict[str, nn.Linear], name: str, act: nn.Module) -> _Block:
    def now(x: Tensor) -> Tensor:
        out: Tensor = layer.get_submodule(layout.down)(act(layer.get_submodule(layout.up)(x)))
        return out

    def joined() -> nn.Module:
        return SparseFeedForward(SparseLinear(of["U"]), act, SparseLinear(of["D"]))

    def install(module: nn.Module) -> None:
        layer.set_submodule(layout.down, module)
        layer.set_submodule(layout.up, nn.Identity())
        layer.set_submodule(f"{layout.up.rpartition('.')[0]}.{name}", nn.Identity())

    return _Block((of["U"], of["D"]), now, joined, install)


def _attention(
    layer: nn.Module, layout: Layout, of: dict[str, nn.Linear], attention: str, output: str | None
) -> _Block:
    heads = layout.heads(layer)

    def now(x: Tensor) -> Tensor:
        out: Tensor = layer.get_submodule(attention)(x)[0]
        return out if output is None else layer.get_submodule(output)(out)

    def joined() -> nn.Module:
        return SparseAttention({letter: SparseLinear(of[letter]) for letter in "QKVO"}, heads)

    def install(module: nn.Module) -> None:
        layer.set_submodule(attention, module)
        if output is not None:
            layer.set_submodule(output, nn.Identity())

    return _Block(tuple(of[letter] for letter in "QKVO"), now, joined, install)


class _Timed:
    """What has been timed: linears of one shape and nearly one density once."""

    def __init__(self) -> None:
        self.known: dict[tuple[tuple[int, int, int], ...], bool] = {}

    def linear(self, linear: nn.Linear) -> bool:
        """Whether a linear runs faster sparse."""
        key = (_alike(linear),)
        if key not in self.known:
            self.known[key] = faster_sparse(linear)
        return self.known[key]

    def block(self, block: _Block) -> bool:
        """Whether a block runs faster joined than as it is."""
        key = tuple(_alike(linear) for linear in block.linears)
        if key not in self.known:
            tried = all(density(linear) <= TRIED_BELOW for linear in block.linears)
            self.known[key] = tried and faster(block.joined(), block.now, block.linears[0].in_features)
        return self.known[key]


def density(linear: nn.Linear) -> float:
    """Share of a linear's weights that are not zero."""
    return int(linear.weight.count_nonzero()) / linear.weight.numel()


def _alike(linear: nn.Linear) -> tuple[int, int, int]:
    return linear.out_features, linear.in_features, round(density(linear) * 20)


def faster_sparse(linear: nn.Linear) -> bool:
    """Whether a linear runs faster sparse than dense here and now, with as many threads as torch has."""
    return density(linear) <= TRIED_BELOW and faster(SparseLinear(linear), linear, linear.in_features)


def faster(sparse: nn.Module, now: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether a module beats what there is, by the best of a few rounds of `LENGTH` tokens."""
    x = torch.randn(1, LENGTH, width)
    forms: tuple[Callable[[Tensor], Any], ...] = (now, sparse)
    best = [float("inf"), float("inf")]
    with torch.inference_mode():
        try:
            sparse(x)
        except RuntimeError:
            # A torch without MKL has no such product.
            return False
        now(x)
        for _ in range(ROUNDS):
            for i, form in enumerate(forms):
                begin = time.perf_counter()
                form(x)
                best[i] = min(best[i], time.perf_counter() - begin)
    return best[0] > GAIN * best[1]


def _csr(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # Torch says that its CSR is new, and that it does not check what it has made itself.
        warnings.simplefilter("ignore")
        wide = weight.to_sparse_csr()
        return torch.sparse_csr_tensor(
            wide.crow_indices().int(), wide.col_indices().int(), wide.values(), weight.shape, check_invariants=False
        )
