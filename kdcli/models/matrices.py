"""The matrices of an encoder that pruning masks: one weight matrix of one type in one layer, fused linears split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.models.layout import MATRICES, Rows, layout_for, linears


@dataclass(frozen=True)
class Matrix:
    """One matrix of one layer.

    Attributes:
        layer: 1 … N; a layer that all share (ALBERT) is layer 1.
        kind: Q, K, V, O, U, D; G is the gate beside U in gated feed-forward blocks; P and P2 project DeBERTa's
            positions.
        path: of the linear, from the base model.
        rows: of the linear's weight [out, in] that are this matrix; None when all are.
    """

    layer: int
    kind: str
    path: str
    linear: nn.Linear
    rows: Rows

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
        """Weights."""
        rows, columns = self.shape
        return rows * columns

    def of(self, weight: Tensor) -> Tensor:
        """This matrix's part of a tensor shaped as the linear's weight: a view, or a copy where rows are picked."""
        return weight if self.rows is None else weight[self.rows]


def matrices(model: PreTrainedModel) -> list[Matrix]:
    """Every matrix of the encoder layers, layer by layer in the order Q K V O U G D P.

    No weight is in two of them; for BERT-base they hold 84.9 million. Embeddings, pooler and head are not among them,
    nor what only one model type has inside its layers (ConvBERT's convolution, MobileBERT's bottlenecks).

    Raises:
        UsageError: a model type without a row in `kdcli.models.layout`.
    """
    base = model.base_model
    layout = layout_for(model.config)
    paths = {id(module): path for path, module in base.named_modules()}
    found: list[Matrix] = []
    layers = layout.modules(base)
    for number, layer in enumerate(layers[:1] if layout.shared else layers, 1):
        of_layer = linears(layout, layer)
        for kind in MATRICES:
            # A gate is not an up projection: its weights are distributed otherwise.
            for letter, (linear, rows) in zip((kind, "G"), of_layer[kind], strict=False):
                if kind == "U" and layout.gate == layout.up:
                    half = linear.out_features // 2
                    # The first half goes through the activation: it is the gate of what multiplies it.
                    found.append(Matrix(number, "U", paths[id(linear)], linear, slice(half, 2 * half)))
                    found.append(Matrix(number, "G", paths[id(linear)], linear, slice(0, half)))
                else:
                    found.append(Matrix(number, letter, paths[id(linear)], linear, rows))
        further = dict(layer.named_modules())
        for kind, name in zip(("P", "P2"), layout.like_q, strict=False):
            module = further.get(name)
            if isinstance(module, nn.Linear):
                found.append(Matrix(number, kind, paths[id(module)], module, None))
    return found
