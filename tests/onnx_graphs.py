"""Build small ONNX graphs."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT


def node(op, inputs, output, **settings):
    """A node that is named after its output."""
    return helper.make_node(op, inputs.split(), [output], name=f"make_{output}", **settings)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[object] | tuple[int, Sequence[object]]],
    outputs: Mapping[str, object],
    arrays: Mapping[str, np.ndarray],
    *,
    opset: int = 18,
) -> onnx.ModelProto:
    """A model with these nodes. Inputs and outputs map names to shapes, or to types and shapes."""

    def values(named):
        typed = {n: of if isinstance(of, tuple) else (FLOAT, of) for n, of in named.items()}
        return [helper.make_tensor_value_info(name, *of) for name, of in typed.items()]

    tensors = [
        onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
        for name, array in arrays.items()
    ]
    made = helper.make_graph(nodes, "graph", values(inputs), values(outputs), tensors)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)
