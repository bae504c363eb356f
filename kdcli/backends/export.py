"""Exports a model to ONNX (float32 or int8) or OpenVINO and compares the file with torch.

Both go through `torch.onnx.export`; OpenVINO reads the ONNX file. OpenVINO's own converter gave NaN for padded
ModernBERT, failed on DeBERTa, and sends telemetry; `read_model` does none of that.
"""

import inspect
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.backends.sessions import Array, Caller, library, onnx_caller, openvino_caller
from kdcli.errors import MachineError, UsageError
from kdcli.models.embedder import Pool
from kdcli.models.shape import positions_of, shape_of
from kdcli.types import Batch

TRACED = (2, 24)  # Batch size and tokens of the recorded graph; both axes stay dynamic
COMPARED = ((3, 17), (2, 150), (1, 9))  # Those of the comparison with torch; rows are padded to different lengths
EXACT = 1e-4  # Largest absolute difference of a float32 file, times the largest output where that exceeds 1
VECTORS = "sentence_embedding"  # The output of a pooling, by the name that other tools read
# The exported outputs of a model, as far as it has them, in this order.
OUTPUTS = ("last_hidden_state", VECTORS, "start_logits", "end_logits", "logits")
BY_ROW = ("logits", VECTORS)  # Of a row, unless an output has an axis of tokens
# Largest relative error of a file. all-MiniLM-L6-v2 has 1e-6 and 0.18; other weights give more than 1. `kdcli export`
# judges vectors in int8 on text instead.
LIMITS = {"fp32": 1e-3, "int8": 0.4}
# Numbers of an activation that share a scale under OpenVINO: the fastest of 32, 64, 128 and 384 with VNNI.
ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class ModelFile:
    """A written model file, and how far it is from torch over the real tokens of `COMPARED`."""

    path: Path  # The file to load; weights of OpenVINO, or above 2 GB, are in a second file beside it
    inputs: tuple[str, ...]  # Names in order; int64 [B, L]
    outputs: tuple[str, ...]
    max_abs: float  # Largest absolute difference
    relative: float  # Norm of all differences over the norm of torch's outputs


def export_onnx(
    model: PreTrainedModel, folder: Path, *, int8: bool = False, pool: Pool | None = None, float_down: bool = False
) -> ModelFile:
    """Write `model.onnx`: an encoder in eval mode, or one with a head for sequences, tokens or questions. `folder` is
    made if missing; after an error it may hold unusable files. With `pool` an encoder gives `sentence_embedding` too.
    With `int8` weights have 8 bits and a scale for each output, activations are quantised at run time. Weights use 7 of
    the 8 bits, because sums of all 8 overflow on processors without VNNI. `float_down` leaves the second linear of each
    feed-forward block, whose inputs have outliers, in float32. Raises UsageError: torch cannot export this
    architecture; MachineError: a library is missing, or the file differs from torch; OSError: the folder cannot be
    written."""
    library("onnxruntime", "onnx")
    file, plain = folder / "model.onnx", folder / ("float.onnx" if int8 else "model.onnx")
    whole = _Whole(model, pool)
    inputs, outputs = _write_onnx(whole, plain, "onnx")
    errors = _compare(whole, inputs, outputs, onnx_caller(plain, threads=0), "fp32")
    if int8:
        _quantise(plain, file, _down(model) if float_down else None)
        errors = _compare(whole, inputs, outputs, onnx_caller(file, threads=0), "int8")
    return ModelFile(file, inputs, outputs, *errors)


def export_openvino(
    model: PreTrainedModel, folder: Path, *, int8: bool = False, pool: Pool | None = None, float_down: bool = False
) -> ModelFile:
    """Write `model.xml` and `model.bin`; arguments and errors as in `export_onnx`. `int8`: weights of linears and
    embeddings in 8 bits, with a scale for each output or word. With VNNI activations are quantised at run time; without
    it int8 only saves memory."""
    openvino = library("openvino", "openvino")
    file, plain = folder / "model.xml", folder / "graph.onnx"
    whole = _Whole(model, pool)
    inputs, outputs = _write_onnx(whole, plain, "openvino")
    graph = openvino.Core().read_model(plain)
    if int8:
        _quantise_openvino(graph, _down(model) if float_down else None)
    openvino.save_model(graph, file, compress_to_fp16=False)
    del graph
    _remove(plain)
    errors = _compare(whole, inputs, outputs, openvino_caller(file, threads=0), "int8" if int8 else "fp32")
    return ModelFile(file, inputs, outputs, *errors)


def difference(reference: Array, other: Array) -> tuple[float, float]:
    """Largest absolute difference, and the norm of the difference over that of the reference (Frobenius)."""
    reference, other = reference.astype(np.float64), other.astype(np.float64)
    gap = reference - other
    return float(np.abs(gap).max()), float(np.linalg.norm(gap) / np.linalg.norm(reference))


class _Whole(nn.Module):
    """A model, and the pooling of its last hidden states if it has one: inputs by name -> outputs by name."""

    def __init__(self, model: PreTrainedModel, pool: Pool | None) -> None:
        super().__init__()
        self.model, self.pool = model, pool

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        outputs = dict(self.model(**inputs))
        if self.pool is not None:
            outputs[VECTORS] = self.pool.compute(outputs["last_hidden_state"], inputs["attention_mask"])
        return outputs


class _Named(nn.Module):
    """A model with positional inputs that returns only the named outputs."""

    def __init__(self, model: _Whole, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        values = (input_ids, attention_mask, token_type_ids)
        outputs = self.model(**dict(zip(self.inputs, values, strict=False)))
        return tuple(outputs[name] for name in self.outputs)


def _down(model: PreTrainedModel) -> tuple[int, int] | None:
    """Inputs and outputs of the second linear of a feed-forward block; None if other linears have these sizes too."""
    shape = shape_of(model.config)
    return (shape.ffn, shape.hidden) if shape.ffn > shape.hidden else None


def _write_onnx(whole: _Whole, file: Path, extra: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write the graph in float32 and return the names of its inputs and outputs; `extra` installs the libraries."""
    model = whole.model
    assert not model.training, "a graph is recorded in eval mode"
    file.parent.mkdir(parents=True, exist_ok=True)
    for name in ("onnx", "onnxscript"):
        library(name, extra)
    # With a single token type the input could only be 0.
    typed = "token_type_ids" in inspect.signature(model.forward).parameters
    typed = typed and int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
    inputs = ("input_ids", "attention_mask", *(("token_type_ids",) if typed else ()))
    batch = _batch(model, inputs, *TRACED)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad(), _quiet():
        result = whole(**batch)
        outputs = tuple(name for name in OUTPUTS if name in result)
        try:
            named, args, shapes = _Named(whole, inputs, outputs).eval(), tuple(batch.values()), (free,) * len(inputs)
            program = torch.onnx.export(
                named, args, dynamo=True, verbose=False, dynamic_shapes=shapes, input_names=inputs, output_names=outputs
            )
        except torch.onnx.OnnxExporterError as error:
            raise UsageError(
                f"torch cannot export {type(model).__name__} ({model.config.model_type}) to ONNX: {_root_cause(error)}",
                "every type in kdcli/models/layout.py can be exported; custom model code often cannot",
            ) from None
        assert program is not None
        program.save(file, external_data=sum(p.numel() * p.element_size() for p in model.parameters()) > 1 << 31)
    return inputs, outputs


def first_line(error: BaseException) -> str:
    """The first line of an error's message, else its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def _remove(file: Path) -> None:
    """Remove an intermediate file with its external data."""
    for part in file.parent.glob(f"{file.name}*"):
        part.unlink()


def _quantise(plain: Path, file: Path, in_float: tuple[int, int] | None = None) -> None:
    """Write the int8 version of a float32 file, then remove the float32 file; linears of `in_float` inputs and outputs
    stay."""
    onnx, quantization = library("onnx", "onnx"), library("onnxruntime.quantization", "onnx")
    # A linear with one row per sequence is a Gemm, which is quantised transposed; recorded shapes would contradict it.
    graph = onnx.load(plain, load_external_data=False)
    graph.graph.ClearField("value_info")
    onnx.save(graph, plain)
    large = any(plain.parent.glob("*.data"))
    with _quiet():
        how: dict[str, Any] = {"weight_type": quantization.QuantType.QInt8, "per_channel": True, "reduce_range": True}
        how["nodes_to_exclude"] = [] if in_float is None else _products(graph, in_float)
        quantization.quantize_dynamic(plain, file, use_external_data_format=large, **how)
    _remove(plain)


def _products(graph: Any, sizes: tuple[int, int]) -> list[str]:
    """Names of the products of an ONNX graph with a constant of so many inputs and outputs."""
    weights = {tensor.name: tuple(tensor.dims) for tensor in graph.graph.initializer}
    found = []
    for node in graph.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights:
            turned = any(a.name == "transB" and a.i for a in node.attribute)
            if weights[node.input[1]] == (sizes[::-1] if turned else sizes):
                found.append(node.name)
    return found


def _quantise_openvino(graph: Any, in_float: tuple[int, int] | None = None) -> None:
    """Replace float weights by int8 weights and scales, as NNCF's `compress_weights` without its telemetry; linears of
    `in_float` inputs and outputs stay."""
    ops = library("openvino.opset13", "openvino")
    for node in graph.get_ops():
        kind = node.get_type_name()
        # A linear multiplies by a constant [K, N] or [N, K]; an embedding gathers rows of one.
        if (place := {"MatMul": 1, "Gather": 0}.get(kind)) is None:
            continue
        source = node.input_value(place).get_node()
        if source.get_type_name() != "Constant":
            continue
        weight = source.get_data()
        if weight.ndim != 2 or weight.dtype != np.float32:
            continue
        summed = 0 if kind == "MatMul" and not node.get_attributes()["transpose_b"] else 1
        if kind == "MatMul" and in_float == (weight.shape if summed == 0 else weight.shape[::-1]):
            continue
        scale = np.abs(weight).max(axis=summed, keepdims=True) / 127
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        low = ops.constant(np.round(weight / scale).astype(np.int8))
        restored = ops.multiply(ops.convert(low, np.float32), ops.constant(scale))
        node.input(place).replace_source_output(restored.output(0))
    graph.set_rt_info(str(ACTIVATION_GROUP), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])


def _compare(
    whole: _Whole, inputs: Sequence[str], outputs: Sequence[str], call: Caller, precision: str
) -> tuple[float, float]:
    """Run a file and torch on the same batches; returns the largest absolute difference and the relative error. Raises
    MachineError: they differ by more than the precision explains."""
    model = whole.model
    pairs = [_outputs_of(whole, call, outputs, _batch(model, inputs, *shape)) for shape in COMPARED]
    reference, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
    max_abs, relative = difference(reference, other)
    exact = EXACT * max(1.0, float(np.abs(reference).max())) if precision == "fp32" else math.inf
    limit = math.inf if whole.pool is not None and precision == "int8" else LIMITS[precision]
    # Written so that NaN fails.
    if not (max_abs <= exact and relative <= limit):
        raise MachineError(
            f"the exported {type(model).__name__} does not compute what torch does: {max_abs:.2e} absolute, "
            f"{relative:.2e} relative; allowed for {precision}: {exact:.1e} and {limit:g}",
            "export in full precision" if precision != "fp32" else "try other versions of onnxscript and the engine",
        )
    return max_abs, relative


def _outputs_of(whole: _Whole, call: Caller, outputs: Sequence[str], batch: Batch) -> tuple[Array, Array]:
    """The outputs of torch and of the file without padding, each as one vector."""
    by_file = call(call.feed(batch))
    with torch.no_grad():
        result = whole(**batch)
        by_torch = [result[name].float().cpu().numpy() for name in outputs]
    mask_BL = batch["attention_mask"].cpu().numpy().astype(bool)
    by_token = [name not in BY_ROW or x.ndim == 3 for name, x in zip(outputs, by_torch, strict=True)]
    torch_side, file_side = (
        np.concatenate([(x[mask_BL] if tokens else x).ravel() for x, tokens in zip(side, by_token, strict=True)])
        for side in (by_torch, by_file)
    )
    return torch_side, file_side


def _batch(model: PreTrainedModel, inputs: Sequence[str], rows: int, length: int) -> Batch:
    """Random tokens of the upper half of the vocabulary; row i is shorter than row i - 1."""
    config = model.config
    length = min(length, positions_of(config) or length)
    drawn = torch.Generator().manual_seed(rows * length)
    ids_BL = torch.randint(config.vocab_size // 2, config.vocab_size, (rows, length), generator=drawn)
    place_L = torch.arange(length)
    mask_BL = (place_L < length - torch.arange(rows)[:, None] * (length // (rows + 1))).long()
    ids_BL = torch.where(mask_BL.bool(), ids_BL, config.pad_token_id or 0)
    types_BL = mask_BL * (place_L > length // 3)
    arrays = {"input_ids": ids_BL, "attention_mask": mask_BL, "token_type_ids": types_BL}
    return {name: arrays[name].to(model.device) for name in inputs}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs of torch.onnx, which are for its developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
