"""Store the weights of an int8 ONNX file in 4 bits, with an integer factor per block.

An int8 weight that is the product of a 4-bit number and its block's factor is stored as both. A few
standard nodes multiply them again. They read only constants, so ONNX Runtime computes them when it
opens the file, and what runs is the int8 graph.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdcli.deploy.quantise import save_graph
from kdcli.deploy.rounding import INT4_FACTORS, block_factors
from kdcli.deploy.sessions import library
from kdcli.errors import MachineError, UsageError
from kdcli.types import Array

if TYPE_CHECKING:
    from onnx import NodeProto

BLOCK = INT4_FACTORS.block or 0
OFFSET = -INT4_FACTORS.low
"""Added to a 4-bit number, so that it is not negative."""
MIN_OPSET = 18
"""The first opset with `BitwiseAnd`."""


def pack(file: Path) -> None:
    """Pack the weights of an int8 ONNX file in place.

    Weights that are not products of factors and 4-bit numbers stay as they are.

    Raises:
        UsageError: No weight can be packed.
        MachineError: The file has an old opset.
    """
    onnx = library("onnx", "onnx")
    model = onnx.load(file)
    opset = next(each.version for each in model.opset_import if each.domain == "")
    if opset < MIN_OPSET:
        raise MachineError(
            f"the graph has opset {opset}, and packed weights need at least {MIN_OPSET}",
            "update torch and onnxscript, or export without --pack",
        )
    graph, tensor_of = model.graph, onnx.numpy_helper.from_array
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    kept = [
        tensor_of(np.array(15, np.uint8), "packed_mask"),
        tensor_of(np.array(4, np.uint8), "packed_bits"),
        tensor_of(np.array(OFFSET, np.int32), "packed_offset"),
    ]
    nodes: list[NodeProto] = []
    widths = set()
    for tensor in graph.initializer:
        name, axis = tensor.name, int(tensor.name in tables)
        parts = None
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 2:
            parts = _divide(onnx.numpy_helper.to_array(tensor), axis)
            widths.add(tensor.dims[axis])
        if parts is None:
            kept.append(tensor)
            continue
        numbers, factors = parts
        kept += [
            tensor_of(numbers, f"{name}_numbers"),
            tensor_of(factors, f"{name}_factors"),
            tensor_of(np.array(tensor.dims), f"{name}_shape"),
        ]
        nodes += _unpack(name, axis + 1)
    if not nodes:
        if not widths:
            why = "the file has no int8 weights"
        elif all(width % BLOCK for width in widths):
            listed = ", ".join(map(str, sorted(widths)))
            why = f"no int8 product has a multiple of {BLOCK} inputs, only {listed}"
        else:
            why = "no int8 product consists of 4-bit numbers times a factor for each block"
        raise UsageError(f"nothing can be packed: {why}", "export with --int8 alone")
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)
    save_graph(model, file, any(file.parent.glob(f"{file.name}.data")))


def _divide(values: Array, axis: int) -> tuple[Array, Array] | None:
    """Divide a matrix into 4-bit numbers and factors.

    Args:
        values: The int8 matrix.
        axis: The axis that is divided into blocks.

    Returns:
        The numbers plus `OFFSET`, two in a byte, and the factor of each block. The lower halves of
        a block's bytes are the first half of its numbers. None if the
        matrix has no whole blocks, or the numbers of a block do not fit in 4 bits.
    """
    if values.shape[axis] % BLOCK:
        return None
    shape = list(values.shape)
    shape[axis : axis + 1] = [-1, BLOCK]
    axis += 1
    blocks = values.reshape(shape)
    factors = block_factors(blocks, axis)
    numbers = blocks // factors
    if numbers.min() < INT4_FACTORS.low or numbers.max() > INT4_FACTORS.high:
        return None
    low, high = np.split((numbers + OFFSET).astype(np.uint8), 2, axis)
    return low | high << 4, factors


def _unpack(name: str, axis: int) -> list["NodeProto"]:
    """Return the nodes that compute a matrix from its numbers and factors."""
    onnx = library("onnx", "onnx")
    node, types = onnx.helper.make_node, onnx.TensorProto

    def part(suffix: str) -> str:
        return f"{name}_{suffix}"

    # ONNX Runtime multiplies no 8-bit integers on a CPU.
    return [
        node("BitwiseAnd", [part("numbers"), "packed_mask"], [part("low")]),
        node("BitShift", [part("numbers"), "packed_bits"], [part("high")], direction="RIGHT"),
        node("Concat", [part("low"), part("high")], [part("blocks")], axis=axis),
        node("Cast", [part("blocks")], [part("wide")], to=types.INT32),
        node("Sub", [part("wide"), "packed_offset"], [part("signed")]),
        node("Cast", [part("factors")], [part("wide_factors")], to=types.INT32),
        node("Mul", [part("signed"), part("wide_factors")], [part("products")]),
        node("Cast", [part("products")], [part("int8")], to=types.INT8),
        node("Reshape", [part("int8"), part("shape")], [name]),
    ]
