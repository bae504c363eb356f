"""Run sparse inference on the CPU.

Linears with few weights left run as CSR times dense; the others stay as they are. The weight [rows,
columns] is the sparse factor, and tokens are the columns of the dense factor, so that a weight is
read once for many tokens. `TOKENS_PER_PRODUCT` tokens at a time keep the inputs of a row in the
cache; 32-bit indices halve the memory traffic.

Transposing the input and the output costs half of what the product gains. Therefore consecutive
linears are joined, with no transposition between them: one module for the four linears of
attention, and one for a feed-forward block (docs/evidence/pruning.md).
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.custom_class import COMPACT_KEY
from kdcli.models.layout import COMPACT_PATHS, Layout, layout_for, linears
from kdcli.models.matrices import matrices

TOKENS_PER_PRODUCT = 64  # number of columns of the dense factor that are computed at a time
TIMED_BELOW = 0.35  # maximum density at which the sparse form is timed; above, it never won
GAIN = 1.1  # minimum speed-up of the sparse form, because timings vary
ROUNDS = 5  # number of timings; the best one counts
LENGTH = 128  # number of tokens in a timing
# Names of the activation in feed-forward modules that apply only the activation after the linear.
ACTIVATIONS = ("intermediate_act_fn", "activation")


class SparseLinear(nn.Module):
    """A linear whose weight is stored in CSR.

    It is for inference only, and is neither saved nor copied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        bias = (
            torch.zeros(self.out_features) if linear.bias is None else linear.bias.detach().clone()
        )
        self.bias = nn.Parameter(bias, requires_grad=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its CSR is in beta
            wide = linear.weight.detach().to_sparse_csr()
            indices = wide.crow_indices().int(), wide.col_indices().int()
            self.csr = torch.sparse_csr_tensor(
                *indices, wide.values(), linear.weight.shape, check_invariants=False
            )

    def product(self, x_IN: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute [columns, tokens] -> [rows, tokens]."""
        return torch.addmm(self.bias[:, None], self.csr, x_IN, out=out)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., columns] -> [..., rows]."""
        return _by_tokens(x, self.out_features, self.product)


class SparseFeedForward(nn.Module):
    """Two sparse linears with the activation between them; only input and output are transposed."""

    def __init__(self, up: SparseLinear, act: nn.Module, down: SparseLinear) -> None:
        super().__init__()
        self.up, self.act, self.down = up, act, down

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., D] -> [..., D]."""
        return _by_tokens(
            x,
            self.down.out_features,
            lambda x_DN: self.down.product(self.act(self.up.product(x_DN))),
        )


class SparseAttention(nn.Module):
    """Self-attention and its output linear, all sparse; only input and output are transposed."""

    def __init__(self, parts: Mapping[str, SparseLinear], heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (parts[letter] for letter in "QKVO")
        self.heads, self.scale = heads, (self.q.out_features // heads) ** -0.5

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> tuple[Tensor, None]:
        """Attend within `attention_mask`.

        The mask is bool (True means that a token may attend) or a bias that is added to the scores.
        """
        batch, length, width = hidden_states.shape
        out_BLO = hidden_states.new_empty(batch, length, self.o.out_features)
        mask_BALL = out_BLO.new_zeros(batch, 1, 1, 1)
        if attention_mask is not None:
            mask_BALL = attention_mask.expand(batch, -1, -1, -1)
            if mask_BALL.dtype == torch.bool:
                lowest = torch.finfo(out_BLO.dtype).min
                mask_BALL = torch.zeros_like(mask_BALL, dtype=out_BLO.dtype).masked_fill_(
                    ~mask_BALL, lowest
                )
        # Take as many rows at once as fill a product.
        several = max(1, TOKENS_PER_PRODUCT // max(1, length))
        for at in range(0, batch, several):
            rows = slice(at, at + several)
            self._rows(
                hidden_states[rows].reshape(-1, width), mask_BALL[rows], out_BLO[rows].flatten(0, 1)
            )
        return out_BLO, None

    def _rows(self, x_NI: Tensor, mask_BALL: Tensor, out_NO: Tensor) -> None:
        """Attend within a few rows of the same length, and write the output of O."""
        pieces = [
            slice(at, at + TOKENS_PER_PRODUCT) for at in range(0, len(x_NI), TOKENS_PER_PRODUCT)
        ]
        qkv_DN = [x_NI.new_empty(part.out_features, len(x_NI)) for part in (self.q, self.k, self.v)]
        for piece in pieces:
            x_IN = x_NI[piece].T.contiguous()
            for part, into_DN in zip((self.q, self.k, self.v), qkv_DN, strict=True):
                part.product(x_IN, out=into_DN[:, piece])
        length, mixed = len(x_NI) // len(mask_BALL), []
        for row, mask_ALL in enumerate(mask_BALL):
            here = slice(row * length, (row + 1) * length)
            q_AKL, k_AKL, v_AKL = (x[:, here].view(self.heads, -1, length) for x in qkv_DN)
            scores_ALL = torch.baddbmm(mask_ALL, q_AKL.transpose(1, 2), k_AKL, alpha=self.scale)
            mixed.append(torch.bmm(v_AKL, scores_ALL.softmax(-1).transpose(1, 2)).flatten(0, 1))
        mixed_DN = torch.cat(mixed, 1)
        for piece in pieces:
            out_NO[piece].copy_(self.o.product(mixed_DN[:, piece]).T)


def _by_tokens(x: Tensor, rows: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of [columns, tokens] to [..., columns], a few tokens at a time."""
    x_NI = x.reshape(-1, x.shape[-1])
    out_NO = x.new_empty(len(x_NI), rows)
    for at in range(0, len(x_NI), TOKENS_PER_PRODUCT):
        # Copy here, because attention and norms would copy a transposed output more slowly.
        out_NO[at : at + TOKENS_PER_PRODUCT].copy_(
            compute(x_NI[at : at + TOKENS_PER_PRODUCT].T.contiguous()).T
        )
    return out_NO.view(*x.shape[:-1], rows)


def sparsify(
    model: PreTrainedModel, choose: Callable[[nn.Linear], bool] | None = None
) -> PreTrainedModel:
    """Copy a model so that linears run sparse where that is faster.

    The given model must have its removed weights at zero. The copy shares all its tensors and is
    for inference only: it cannot be saved or trained. `choose` decides whether a linear runs
    sparse. Without it, kdcli times the linears, once for all that have the same shape and nearly
    the same density.

    Raises UsageError if the model is not in float32 on the CPU, or if it is compacted.
    """
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            raise UsageError(
                f"sparse inference needs float32 on the CPU, got {parameter.dtype} on "
                f"{parameter.device}",
                "convert the model first: model.cpu().float()",
            )
    if hasattr(model.config, COMPACT_KEY):
        raise UsageError(
            "a compacted model cannot run sparse", "use the masked model it was made from"
        )
    timed: dict[tuple[tuple[int, int, int], ...], bool] = {}

    def runs_sparse(
        dense: tuple[nn.Linear, ...], now: Callable[[Tensor], Tensor], make: Callable[[], nn.Module]
    ) -> bool:
        if choose is not None:
            return all(map(choose, dense))
        key = tuple(
            (linear.out_features, linear.in_features, round(_density(linear) * 20))
            for linear in dense
        )
        if key not in timed:
            timed[key] = faster_sparse(dense, now, make)
        return timed[key]

    # The copy shares every tensor but has its own modules.
    small: PreTrainedModel = copy.deepcopy(
        model, {id(t): t for t in (*model.parameters(), *model.buffers())}
    )
    layout = layout_for(model.config)
    layers = {id(layer): layer for layer in layout.modules(small.base_model)}.values()
    blocks = [
        block for layer in layers for block in _blocks(layer, layout, str(model.config.model_type))
    ]
    for path, linear in {m.path: m.linear for m in matrices(small)}.items():
        if runs_sparse((linear,), linear, partial(SparseLinear, linear)):
            small.base_model.set_submodule(path, SparseLinear(linear))
    for block in blocks:
        if runs_sparse(block.dense, block.now, block.joined):
            for path in block.paths[1:]:
                block.layer.set_submodule(path, nn.Identity())
            block.layer.set_submodule(block.paths[0], block.joined())
    return small.eval()


@dataclass(frozen=True)
class _Block:
    """Linears of a layer that are faster if they run sparse together."""

    layer: nn.Module
    dense: tuple[nn.Linear, ...]
    # Computes [1, L, D] as the layer does, with each linear in its current form.
    now: Callable[[Tensor], Tensor]
    joined: Callable[[], nn.Module]  # makes the module that replaces the linears
    paths: tuple[str, ...]  # the first path gets that module, the others become identities


def _blocks(layer: nn.Module, layout: Layout, kind: str) -> Iterator[_Block]:
    """Yield the blocks of a layer whose linears can be joined."""
    of = {letter: parts[0][0] for letter, parts in linears(layout, layer).items()}
    at: Callable[[str], Any] = layer.get_submodule
    inside = layout.up.rpartition(".")[0]
    acts = {name: module for name, module in at(inside).named_children() if name in ACTIVATIONS}
    # Join them only if nothing but the activation is between them.
    if acts and layout.gate is None:
        name, act = acts.popitem()
        yield _Block(
            layer,
            (of["U"], of["D"]),
            lambda x: at(layout.down)(act(at(layout.up)(x))),
            lambda: SparseFeedForward(SparseLinear(of["U"]), act, SparseLinear(of["D"])),
            (layout.down, layout.up, f"{inside}.{name}"),
        )
    if layout.compact:
        (attention, output), heads = COMPACT_PATHS[kind][:2], layout.heads(layer)
        yield _Block(
            layer,
            tuple(of[letter] for letter in "QKVO"),
            lambda x: at(attention)(x)[0] if output is None else at(output)(at(attention)(x)[0]),
            lambda: SparseAttention({letter: SparseLinear(of[letter]) for letter in "QKVO"}, heads),
            (attention,) if output is None else (attention, output),
        )


def _density(linear: nn.Linear) -> float:
    return int(linear.weight.count_nonzero()) / linear.weight.numel()


def faster_sparse(
    dense: tuple[nn.Linear, ...], now: Callable[[Tensor], Tensor], make: Callable[[], nn.Module]
) -> bool:
    """Return whether linears run faster sparse than `now`.

    The timing uses torch's current number of threads.
    """
    return all(_density(linear) <= TIMED_BELOW for linear in dense) and faster(
        make(), now, dense[0].in_features
    )


def faster(sparse: nn.Module, now: Callable[[Tensor], Tensor], width: int) -> bool:
    """Return whether a sparse module is faster than `now`, by the best of `ROUNDS` timings."""
    x, best = torch.randn(1, LENGTH, width), [float("inf"), float("inf")]
    forms: tuple[Callable[[Tensor], object], ...] = (now, sparse)
    with torch.inference_mode():
        try:
            sparse(x)
        except RuntimeError:
            return False  # torch without MKL lacks this product
        now(x)
        for _ in range(ROUNDS):
            for i, form in enumerate(forms):
                begin = time.perf_counter()
                form(x)
                best[i] = min(best[i], time.perf_counter() - begin)
    return best[0] > GAIN * best[1]
