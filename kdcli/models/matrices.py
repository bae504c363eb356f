"""The weight matrices that pruning masks: per layer and type, with fused linears split."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.models.layout import MATRICES, Rows, layout_for, linears


@dataclass(frozen=True)
class Matrix:
    """One matrix of one layer."""

    layer: int  # 1 ... N; the shared layer of ALBERT is layer 1
    kind: str  # Q, K, V, O, U, D; G is the gate beside U; P and P2 project DeBERTa's positions
    path: str  # of the linear, from the base model
    linear: nn.Linear
    rows: Rows  # of the linear's weight [out, in]; None for all

    @property
    def name(self) -> str:
        """Layer and type: `3.Q`."""
        return f"{self.layer}.{self.kind}"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows = torch.arange(self.linear.out_features)
        return self.of(rows).numel(), self.linear.in_features

    @property
    def numel(self) -> int:
        """Number of weights."""
        rows, columns = self.shape
        return rows * columns

    def of(self, weight: Tensor) -> Tensor:
        """This matrix's part of a tensor shaped as the linear's weight: a view, or a copy for rows by index."""
        return weight if self.rows is None else weight[self.rows]


def matrices(model: PreTrainedModel) -> list[Matrix]:
    """All matrices of the encoder layers, layer by layer in the order Q K V O U G D P; no weight is in two. Embeddings,
    pooler, head and what only one type has in its layers (ConvBERT's convolution) are excluded."""
    base = model.base_model
    layout = layout_for(model.config)
    paths = {id(module): path for path, module in base.named_modules()}
    all_matrices: list[Matrix] = []
    layers = layout.modules(base)
    for number, layer in enumerate(layers[:1] if layout.shared else layers, 1):
        of_layer = linears(layout, layer)
        for kind in MATRICES:
            # A gate is a kind of its own: its weights are distributed differently.
            for letter, (linear, rows) in zip((kind, "G"), of_layer[kind], strict=False):
                if kind == "U" and layout.gate == layout.up:
                    # The first half goes through the activation: it is the gate.
                    half = linear.out_features // 2
                    all_matrices.append(Matrix(number, "U", paths[id(linear)], linear, slice(half, 2 * half)))
                    all_matrices.append(Matrix(number, "G", paths[id(linear)], linear, slice(0, half)))
                else:
                    all_matrices.append(Matrix(number, letter, paths[id(linear)], linear, rows))
        further = dict(layer.named_modules())
        for kind, name in zip(("P", "P2"), layout.like_q, strict=False):
            module = further.get(name)
            if isinstance(module, nn.Linear):
                all_matrices.append(Matrix(number, kind, paths[id(module)], module, None))
    return all_matrices
