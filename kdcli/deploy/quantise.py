"""Quantise a recorded graph product by product, and measure the error of each product.

A product is named after the linear whose weights it multiplies by. Graphs rename weights and fold
transposes, so a product is identified by the content of its matrix.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdcli.deploy.sessions import library
from kdcli.types import Array, Batch

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


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a model by name; a linear that layers share appears once."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


def keys_of(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Return the keys of the named linears."""
    by_name = linears(model)
    return {key_of(by_name[name].weight.detach().float().cpu().numpy()) for name in names}


def product_errors(
    model: nn.Module, outputs: Outputs, batches: Sequence[Batch], format: str, precision: str
) -> dict[str, float]:
    """Measure how much each linear's own rounding changes the outputs; the largest error first.

    The result maps each linear to the relative error of the outputs over the calibration batches if
    only that linear is rounded as the runtime of `format` rounds it.
    """
    with torch.no_grad():
        exact = np.concatenate([outputs(batch) for batch in batches])
        errors = {}
        for name, linear in linears(model).items():
            weight = _rounded_weight(linear.weight, format, precision)

            def rounded(
                module: nn.Linear, inputs: tuple[Tensor], _: Tensor, weight: Tensor = weight
            ) -> Tensor:
                return F.linear(_rounded_input(inputs[0], format, precision), weight, module.bias)

            handle = linear.register_forward_hook(rounded)
            try:
                changed = np.concatenate([outputs(batch) for batch in batches])
            finally:
                handle.remove()
            errors[name] = float(np.linalg.norm(changed - exact) / np.linalg.norm(exact))
    return dict(sorted(errors.items(), key=lambda each: -each[1]))


def _rounded_weight(weight: Tensor, format: str, precision: str) -> Tensor:
    if precision == "q4":
        return _symmetric(weight, 7, WEIGHT_BLOCK)
    # ONNX Runtime gets 7 of the 8 bits; see `reduce_range` in `quantise_onnx`.
    return _symmetric(weight, 63 if format == "onnx" else 127)


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

    Products in `in_float` keep their float32 weights.
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
        onnx.save(graph, plain)
        # With all 8 bits, sums overflow on processors without VNNI, hence `reduce_range`.
        quantization = library("onnxruntime.quantization", "onnx")
        settings = {
            "weight_type": quantization.QuantType.QInt8,
            "per_channel": True,
            "reduce_range": True,
        }
        quantization.quantize_dynamic(
            plain, file, use_external_data_format=large, nodes_to_exclude=kept, **settings
        )
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


def _products(graph: Any, folder: Path) -> Iterator[tuple[str, str]]:
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


def quantise_openvino(graph: Any, in_float: Keys) -> None:
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
        if kind == "MatMul" and in_float and key_of(weight if summed else weight.T) in in_float:
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
