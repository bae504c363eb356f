"""Fold the division of a product's input into the weights that compute this input."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdcli.deploy.sessions import library
from kdcli.types import Array

if TYPE_CHECKING:
    import onnx

# The order of the axes when attention moves its heads before the tokens, and back.
SWAPPED_HEADS = [0, 2, 1, 3]


class Folding:
    """Multiplies the channels of a graph's tensors by constants, without additional nodes.

    Attention adds vectors of values, weighted by numbers that are the same for all channels of a
    head. Multiplying a channel of the values therefore multiplies the same channel of the result.

    Args:
        graph: The float32 graph.
        folder: The folder of its external weights.
    """

    def __init__(self, graph: "onnx.ModelProto", folder: Path) -> None:
        nodes = graph.graph.node
        self._folder = folder
        self._tensors = {tensor.name: tensor for tensor in graph.graph.initializer}
        self._producers = {name: node for node in nodes for name in node.output}
        self._uses = Counter(name for node in nodes for name in node.input)
        self._uses.update(output.name for output in graph.graph.output)

    def multiply(self, name: str, readers: int, factor_I: Array) -> Sequence[str] | None:
        """Multiply the channels of a tensor, if its producers allow it.

        Args:
            name: The tensor.
            readers: The number of nodes that may read the new values.
            factor_I: The factor of each channel.

        Returns:
            The names of the constants that were multiplied. None if the graph is unchanged, because
            other nodes read the tensor or no constants determine its channels.
        """
        constants = self._constants(name, readers)
        if constants is None or any(
            self._tensors[constant].dims[-1:] != [len(factor_I)] for constant in constants
        ):
            return None
        onnx = library("onnx", "onnx")
        for constant in constants:
            tensor = self._tensors[constant]
            values = onnx.numpy_helper.to_array(tensor, base_dir=str(self._folder))
            new = np.ascontiguousarray(values * factor_I, values.dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(new, constant))
        return constants

    def _constants(self, name: str, readers: int = 1) -> list[str] | None:
        """Return the constants whose last axis holds the channels of a tensor."""
        node = self._producers.get(name)
        if node is None or self._uses[name] != readers:
            return None
        if node.op_type in ("LayerNormalization", "MatMul"):
            return self._own(node.input[1:])
        if node.op_type == "Add":
            biases = [each for each in node.input if each in self._tensors]
            others = [each for each in node.input if each not in self._tensors]
            bias = self._own(biases)
            product = self._constants(others[0]) if len(others) == 1 else None
            return None if bias is None or product is None else [*bias, *product]
        if (values := self._values_of_attention(node)) is not None:
            return self._constants(values)
        return None

    def _own(self, names: Sequence[str]) -> list[str] | None:
        """Return the names if each is a constant that no other node reads."""
        is_own = all(name in self._tensors and self._uses[name] == 1 for name in names)
        return list(names) if names and is_own else None

    def _values_of_attention(self, node: "onnx.NodeProto") -> str | None:
        """Return the values [B, L, A * K] whose weighted sums are a node's output."""
        producer: onnx.NodeProto | None = node
        name = ""
        for kind, place in (
            ("Reshape", 0),
            ("Transpose", 0),
            ("MatMul", 1),
            ("Transpose", 0),
            ("Reshape", 0),
        ):
            if producer is None or producer.op_type != kind:
                return None
            if kind == "Transpose" and list(producer.attribute[0].ints) != SWAPPED_HEADS:
                return None
            name = str(producer.input[place])
            if self._uses[name] != 1:
                return None
            producer = self._producers.get(name)
        return name
