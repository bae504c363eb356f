"""Quantise a recorded graph product by product, and measure the error of each product.

A product is named after the linear whose weights it multiplies by. An embedding, which multiplies
its table by one-hot rows, counts as a product too. Graphs rename weights and fold transposes, so a
product is identified by the content of its matrix.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdcli.deploy.sessions import library
from kdcli.types import Array, Batch

if TYPE_CHECKING:
    import onnx
    import openvino

Keys = Set[str]
Outputs = Callable[[Batch], Array]  # returns the model's outputs that are scored, as one vector
# Number of activation values that share a scale under OpenVINO. 128 is the fastest of 32, 64, 128
# and 384 with VNNI.
ACTIVATION_GROUP = 128
WEIGHT_BLOCK = 32  # number of an output's weights that share a scale in 4 bits
LOGGERS = ("onnxruntime.quantization.matmul_nbits_quantizer", "onnxruntime.transformers.float16")


def key_of(weight: Array) -> str:
    """Return the key of a matrix [out, in]."""
    return hashlib.sha256(
        repr(weight.shape).encode() + np.ascontiguousarray(weight, np.float32).tobytes()
    ).hexdigest()


def products(model: nn.Module) -> dict[str, nn.Linear | nn.Embedding]:
    """Return a model's linears and embeddings by name; one that layers share appears once."""
    kinds = (nn.Linear, nn.Embedding)
    return {name: part for name, part in model.named_modules() if isinstance(part, kinds)}


def keys_of(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Return the keys of the named products."""
    by_name = products(model)
    return {key_of(by_name[name].weight.detach().float().cpu().numpy()) for name in names}


def product_errors(
    model: nn.Module, outputs: Outputs, batches: Sequence[Batch], format: str, precision: str
) -> dict[str, float]:
    """Measure how much each product's own rounding changes the outputs; the largest error first.

    The result maps each product to the relative error of the outputs over the calibration batches
    if only that product is rounded as the runtime of `format` rounds it.
    """
    with torch.no_grad():
        exact = np.concatenate([outputs(batch) for batch in batches])
        errors = {}
        for name, module in products(model).items():
            with _rounded(module, format, precision):
                changed = np.concatenate([outputs(batch) for batch in batches])
            errors[name] = float(np.linalg.norm(changed - exact) / np.linalg.norm(exact))
    return dict(sorted(errors.items(), key=lambda each: -each[1]))


@contextmanager
def _rounded(module: nn.Linear | nn.Embedding, format: str, precision: str) -> Iterator[None]:
    """Let a module compute with rounded weights and, if it is a linear, with rounded inputs."""
    exact = module.weight.data

    def round_input(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return _rounded_input(inputs[0], format, precision)

    handle = None
    if isinstance(module, nn.Linear):
        handle = module.register_forward_pre_hook(round_input)
    module.weight.data = _rounded_weight(module, format, precision)
    try:
        yield
    finally:
        module.weight.data = exact
        if handle is not None:
            handle.remove()


def _rounded_weight(module: nn.Linear | nn.Embedding, format: str, precision: str) -> Tensor:
    if precision == "q4":
        return _signed_blocks(module.weight.data)
    # ONNX Runtime's products get 7 of the 8 bits; see `reduce_range` in `quantise_onnx`.
    is_reduced = format == "onnx" and isinstance(module, nn.Linear)
    return _symmetric(module.weight.data, 64 if is_reduced else 127)


def _signed_blocks(x: Tensor) -> Tensor:
    """Fake-quantise to integers in [-8, 7], as ONNX Runtime does in 4 bits.

    Every `WEIGHT_BLOCK` values of the last axis share a scale. Its sign lets the largest of them
    become -8.
    """
    width = x.shape[-1]
    groups = F.pad(x, (0, -width % WEIGHT_BLOCK)).reshape(*x.shape[:-1], -1, WEIGHT_BLOCK)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / -8)
    rounded = torch.round(groups / scale).clamp(-8, 7) * scale
    return rounded.reshape(*x.shape[:-1], -1)[..., :width]


def _rounded_input(x: Tensor, format: str, precision: str) -> Tensor:
    if precision == "q4":
        return x
    if format == "openvino":
        return _symmetric(x, 127, ACTIVATION_GROUP)
    # The whole tensor shares one scale and one zero point.
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(x.dtype).tiny)
    zero = torch.round(-low / scale)
    return (torch.clamp(torch.round(x / scale) + zero, 0, 255) - zero) * scale


def _symmetric(x: Tensor, limit: int, group: int | None = None) -> Tensor:
    """Fake-quantise to integers in [-limit, limit].

    Every `group` values of the last axis share a scale; by default, all of them do.
    """
    width = x.shape[-1]
    group = group or width
    groups = F.pad(x, (0, -width % group)).reshape(*x.shape[:-1], -1, group)
    scale = (groups.abs().amax(-1, keepdim=True) / limit).clamp(min=torch.finfo(x.dtype).tiny)
    return (torch.round(groups / scale) * scale).reshape(*x.shape[:-1], -1)[..., :width]


def quantise_onnx(plain: Path, file: Path, precision: str, in_float: Keys) -> None:
    """Write a float32 ONNX file in `int8`, `fp16` or `q4`.

    Products in `in_float` keep their float32 weights. In int8, a table has one scale per row.
    """
    onnx = library("onnx", "onnx")
    graph = onnx.load(plain, load_external_data=False)
    # A linear with one row per sequence is a Gemm, which is quantised transposed. The recorded
    # shapes would contradict it.
    graph.graph.ClearField("value_info")
    kept = (
        [name for name, key in _products(graph, plain.parent) if key in in_float]
        if in_float
        else []
    )
    large = any(plain.parent.glob(f"{plain.name}.data"))
    if precision == "int8":
        # The quantiser would round a whole table with one scale, the largest entry's.
        kept += _round_tables(graph, plain.parent, in_float)
        by_row = plain.with_name(f"by_row_{plain.name}")
        onnx.save(graph, by_row)
        # With all 8 bits, sums overflow on processors without VNNI, hence `reduce_range`.
        quantization = library("onnxruntime.quantization", "onnx")
        settings = {
            "weight_type": quantization.QuantType.QInt8,
            "per_channel": True,
            "reduce_range": True,
        }
        quantization.quantize_dynamic(
            by_row, file, use_external_data_format=large, nodes_to_exclude=kept, **settings
        )
        by_row.unlink()
        return
    graph = onnx.load(plain)
    graph.graph.ClearField("value_info")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if precision == "fp16":
        # Protobuf cannot hold a graph of 2 GB, so such a graph has no inferred types here.
        half = library("onnxruntime.transformers.float16", "onnx").convert_float_to_float16
        graph = half(graph, keep_io_types=True, disable_shape_infer=large)
    else:
        tool = library("onnxruntime.quantization.matmul_nbits_quantizer", "onnx")
        axes = (("MatMul", 0), ("Gather", 1))
        config = tool.DefaultWeightOnlyQuantConfig(
            block_size=WEIGHT_BLOCK,
            is_symmetric=True,
            quant_axes=axes,
            op_types_to_quantize=("MatMul", "Gather"),
        )
        quantizer = tool.MatMulNBitsQuantizer(graph, nodes_to_exclude=kept, algo_config=config)
        quantizer.process()
        graph = quantizer.model.model
    onnx.save(graph, file, save_as_external_data=large, location=f"{file.name}.data")


def _products(graph: "onnx.ModelProto", folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the key of each product of an ONNX graph with a constant."""
    onnx = library("onnx", "onnx")
    weights = {tensor.name: tensor for tensor in graph.graph.initializer}
    for node in graph.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights:
            weight = onnx.numpy_helper.to_array(weights[node.input[1]], base_dir=str(folder))
            turned = any(a.name == "transB" and a.i for a in node.attribute)
            key = key_of(weight if turned else weight.T)
            yield node.name, key
            # ONNX Runtime renames a Gemm to this before it quantises.
            yield f"{node.name}_MatMul", key
        elif node.op_type == "Gather" and node.input[0] in weights:
            table = weights[node.input[0]]
            yield node.name, key_of(onnx.numpy_helper.to_array(table, base_dir=str(folder)))


def _round_tables(graph: "onnx.ModelProto", folder: Path, in_float: Keys) -> list[str]:
    """Round the float32 tables of an ONNX graph to int8, with one scale per row.

    A table is gathered in int8, and multiplied by the gathered scales. Tables in `in_float` stay.

    Returns the names of all gathers of tables and scales, which the quantiser must not change.
    """
    onnx = library("onnx", "onnx")
    array_of, tensor_of = onnx.numpy_helper.to_array, onnx.numpy_helper.from_array
    floats = onnx.TensorProto.FLOAT
    tables = {
        tensor.name: tensor
        for tensor in graph.graph.initializer
        if tensor.data_type == floats and len(tensor.dims) == 2
    }
    nodes, gathers, rounded = [], [], set()
    for node in graph.graph.node:
        nodes.append(node)
        table = node.input[0] if node.input else ""
        on_rows = all(a.i == 0 for a in node.attribute if a.name == "axis")
        if node.op_type != "Gather" or table not in tables or not on_rows:
            continue
        gathers.append(node.name)
        low, scale = f"{table}_int8", f"{table}_scale"
        if table not in rounded:
            x_VH = array_of(tables[table], base_dir=str(folder))
            if in_float and key_of(x_VH) in in_float:
                continue
            largest_V1 = np.abs(x_VH).max(axis=1, keepdims=True)
            scale_V1 = np.where(largest_V1 > 0, largest_V1 / 127, 1).astype(np.float32)
            low_VH = np.round(x_VH / scale_V1).astype(np.int8)
            graph.graph.initializer.extend([tensor_of(low_VH, low), tensor_of(scale_V1, scale)])
            rounded.add(table)
        ids, result = node.input[1], node.output[0]
        gathers.append(f"{node.name}_scale")
        nodes[-1:] = [
            onnx.helper.make_node("Gather", [low, ids], [f"{result}_int8"], name=node.name),
            onnx.helper.make_node("Gather", [scale, ids], [f"{result}_scale"], name=gathers[-1]),
            onnx.helper.make_node(
                "Cast", [f"{result}_int8"], [f"{result}_cast"], name=f"{node.name}_cast", to=floats
            ),
            onnx.helper.make_node(
                "Mul", [f"{result}_cast", f"{result}_scale"], [result], name=f"{node.name}_product"
            ),
        ]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    unused = rounded - {name for node in nodes for name in node.input}
    weights = [tensor for tensor in graph.graph.initializer if tensor.name not in unused]
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(weights)
    return gathers


def quantise_openvino(graph: "openvino.Model", in_float: Keys) -> None:
    """Replace float weights by int8 weights and scales.

    This is NNCF's `compress_weights` without its telemetry. Products in `in_float` keep their
    weights.
    """
    ops = library("openvino.opset13", "openvino")
    for node in graph.get_ops():
        kind = node.get_type_name()
        # A linear multiplies by a constant [K, N] or [N, K]. An embedding gathers rows of a
        # constant.
        if (place := {"MatMul": 1, "Gather": 0}.get(kind)) is None:
            continue
        source = node.input_value(place).get_node()
        if source.get_type_name() != "Constant":
            continue
        weight = source.get_data()
        if weight.ndim != 2 or weight.dtype != np.float32:
            continue
        summed = 0 if kind == "MatMul" and not node.get_attributes()["transpose_b"] else 1
        if in_float and key_of(weight if summed else weight.T) in in_float:
            continue
        scale = np.abs(weight).max(axis=summed, keepdims=True) / 127
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        low = ops.constant(np.round(weight / scale).astype(np.int8))
        restored = ops.multiply(ops.convert(low, np.float32), ops.constant(scale))
        node.input(place).replace_source_output(restored.output(0))
    graph.set_rt_info(str(ACTIVATION_GROUP), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])


def smallest_count(limit: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest count in 0 ... `limit` for which `holds` is true, or None.

    A larger count must never be worse. The search doubles the count until it holds, then halves the
    gap. The result is None if `limit` itself does not hold.
    """
    below, count = -1, 0
    while not holds(count):
        if count == limit:
            return None
        below, count = count, min(limit, max(1, 2 * count))
    while count - below > 1:
        middle = (below + count) // 2
        below, count = (below, middle) if holds(middle) else (middle, count)
    return count
