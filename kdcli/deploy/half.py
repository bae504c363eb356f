"""Write a graph in half precision, except for the nodes whose values it cannot hold."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kdcli.deploy.sessions import library, onnx_caller
from kdcli.errors import MachineError
from kdcli.types import Array, Batch

if TYPE_CHECKING:
    import onnx

MAX_VALUE = float(np.finfo(np.float16).max) / 2
"""Largest magnitude that is computed in half precision. Other texts may have larger values."""
MASKED = 1e30
"""Values from here on stand for masked positions, which half precision may replace."""
ROWS_AT_ONCE = 64
"""Number of rare tokens that are run at once."""


def nodes_beyond_half(plain: Path, batches: Sequence[Batch]) -> set[str]:
    """Return the nodes of a float32 file that read or compute values above `MAX_VALUE`.

    Weights count too. Tokens with such an embedding are also run, because the texts may lack
    them.

    Args:
        plain: The file.
        batches: The texts on which it is run.
    """
    onnx = library("onnx", "onnx")
    graph = onnx.load(plain, load_external_data=False)
    outputs = {each.name for each in graph.graph.output}
    names = [name for node in graph.graph.node for name in node.output if name]
    inner = [name for name in names if name not in outputs]
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    watched = plain.with_name(f"watched_{plain.name}")
    onnx.save(graph, watched)
    call = onnx_caller(watched, threads=0)
    order = [each.name for each in graph.graph.output]
    large, rare = set(), []
    tables = {each.input[0] for each in graph.graph.node if "input_ids" in each.input[1:]}
    for each in graph.graph.initializer:
        is_large = _beyond_half(onnx.numpy_helper.to_array(each, str(plain.parent)))
        if is_large.any():
            large.add(each.name)
        if is_large.any() and each.name in tables:
            ids_N = np.flatnonzero(is_large.any(1))
            for begin in range(0, len(ids_N), ROWS_AT_ONCE):
                ids_B = torch.from_numpy(ids_N[begin : begin + ROWS_AT_ONCE])
                # A graph may not accept a text of one token.
                rare.append({"input_ids": ids_B[:, None].expand(-1, 2)})
    for batch in (*batches, *rare):
        outputs_of_batch = zip(order, call(call.feed(batch)), strict=True)
        large |= {name for name, array in outputs_of_batch if _beyond_half(array).any()}
    watched.unlink()
    return {node.name for node in graph.graph.node if large & {*node.input, *node.output}}


def _beyond_half(array: Array) -> Array:
    """Return for each value whether it is a real one above `MAX_VALUE`."""
    sizes = np.abs(array)
    is_large: Array = (array.dtype == np.float32) & (sizes > MAX_VALUE) & (sizes < MASKED)
    return is_large


def in_half(graph: "onnx.ModelProto", in_float: Set[str], *, large: bool) -> "onnx.ModelProto":
    """Return a graph in half precision.

    Args:
        graph: The graph in float32.
        in_float: The names of nodes that stay in float32.
        large: Whether the weights are in a second file. Protobuf cannot hold such a graph, so it
            has no inferred types here, and nodes cannot stay in float32.
    """
    convert = library("onnxruntime.transformers.float16", "onnx").convert_float_to_float16
    if large and in_float:
        raise MachineError(
            f"the values of {len(in_float)} nodes are too large for half precision, and a file "
            "above 2 GB cannot keep nodes in float32",
            "export with --int8, or in float32",
        )
    kept = sorted(in_float)
    half: onnx.ModelProto = convert(
        graph, keep_io_types=True, disable_shape_infer=large, node_block_list=kept
    )
    if kept:
        _join_casts(half)
    return half


def _join_casts(graph: "onnx.ModelProto") -> None:
    """Pass values between nodes in float32 without half precision in between.

    The converter casts each value that such a node computes to half precision and, once for each
    reader in float32, back.
    """
    nodes = list(graph.graph.node)
    exact = {n.output[0]: n.input[0] for n in nodes if n.name.endswith("_cast_to_fp16_node")}
    back = {
        n.output[0]: exact[n.input[0]]
        for n in nodes
        if n.name.endswith("_cast_to_fp32_node") and n.input[0] in exact
    }
    kept, computed = [], set(back)
    for node in nodes:
        if node.output[0] in computed:
            continue
        computed.update(filter(None, node.output))
        for place, name in enumerate(node.input):
            node.input[place] = back.get(name, name)
        kept.append(node)
    used = {name for node in kept for name in node.input} | {o.name for o in graph.graph.output}
    del graph.graph.node[:]
    graph.graph.node.extend(node for node in kept if used & set(node.output))
    library("onnxruntime.transformers.onnx_model", "onnx").OnnxModel(graph).topological_sort()
