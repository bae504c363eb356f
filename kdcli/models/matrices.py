"""List the weight matrices that pruning masks, by layer and type, with fused linears split."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.models.layout import Rows, layout_for, linears


@dataclass(frozen=True)
class Matrix:
    """One matrix of one layer."""

    layer: int  # 1 ... N; ALBERT's shared layer is layer 1
    kind: str  # Q, K, V, O, U, D; G is the gate next to U; P and P2 project DeBERTa's positions
    path: str  # the linear's path in the base model
    linear: nn.Linear
    rows: Rows  # the matrix's rows of the linear's weight [out, in]

    @property
    def name(self) -> str:
        """The layer and type, such as `3.Q`."""
        return f"{self.layer}.{self.kind}"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self.of(torch.arange(self.linear.out_features)).numel(), self.linear.in_features

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, weight: Tensor) -> Tensor:
        """Return this matrix's part of a tensor that has the shape of the linear's weight.

        The result is a view, or a copy if the rows are given by index.
        """
        return weight[self.rows_on(weight.device)]

    def rows_on(self, device: torch.device) -> Rows:
        """Return `rows` for a device; indices are copied to each device once."""
        if isinstance(self.rows, slice):
            return self.rows
        if device not in self._copies:
            self._copies[device] = self.rows.to(device, non_blocking=True)
        return self._copies[device]

    @functools.cached_property
    def _copies(self) -> dict[torch.device, Tensor]:
        return {}


def matrices(model: PreTrainedModel) -> list[Matrix]:
    """Return all matrices of the encoder layers, layer by layer, in the order Q K V O U G D P.

    Every weight is in at most one matrix. The embeddings, the pooler, the head, and parts that only
    one model type has in its layers (ConvBERT's convolution) are excluded.
    """
    layout, result = layout_for(model.config), list[Matrix]()
    paths = {module: path for path, module in model.base_model.named_modules()}
    layers = layout.modules(model.base_model)
    for number, layer in enumerate(layers[:1] if layout.shared else layers, 1):
        parts: list[tuple[str, nn.Linear, Rows]] = []
        for kind, linears_of_kind in linears(layout, layer).items():
            # A gate is its own kind, because its weights are distributed differently.
            parts += [
                (letter, *part) for letter, part in zip((kind, "G"), linears_of_kind, strict=False)
            ]
            if kind == "U" and layout.gate == layout.up:
                # The first half goes through the activation, so it is the gate.
                _, linear, _ = parts.pop()
                half = linear.out_features // 2
                parts += [("U", linear, slice(half, 2 * half)), ("G", linear, slice(0, half))]
        further = dict(layer.named_modules())
        for kind, name in zip(("P", "P2"), layout.like_q, strict=False):
            if isinstance(module := further.get(name), nn.Linear):
                parts.append((kind, module, slice(None)))
        result += [
            Matrix(number, kind, paths[linear], linear, rows) for kind, linear, rows in parts
        ]
    return result
