"""A model as a file for another engine: ONNX (float32 or int8) and OpenVINO, compared with torch before it is kept.

There is one way out of torch, `torch.onnx.export`; OpenVINO reads its ONNX file. OpenVINO's own reading of a torch
graph gave NaN for padded ModernBERT and could not convert DeBERTa, and `openvino.convert_model` reports its use over
the network unless told not to; `read_model` does neither.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import shutil
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
from kdcli.disk import disk_errors
from kdcli.errors import MachineError, UsageError
from kdcli.models.shape import positions_of
from kdcli.types import Batch

TRACED = (2, 24)
"""Shape of the batch the graph is recorded with; both axes stay free."""
COMPARED = ((3, 17), (2, 150), (1, 9))
"""Shapes of the batches on which a file is compared with torch; rows are padded to different lengths."""
EXACT = 1e-4
"""Largest absolute difference a float32 file may have, for outputs up to 1; above, in proportion to the largest."""
OUTPUTS = ("last_hidden_state", "start_logits", "end_logits", "logits")
"""What is wanted of a model's outputs, those it has, in this order."""
LIMITS = {"fp32": 1e-3, "half": 0.02, "int8": 0.4}
"""Largest relative error of a file. Measured of all-MiniLM-L6-v2: 1e-6, 1e-3 and 0.18; with other weights
it is more than 1."""

ACTIVATION_GROUP = 128
"""Numbers of an activation that share a scale under OpenVINO. Of a 6x384 on one processor with VNNI, 1 × 128 tokens:
32 in 13.5 ms, 64 in 11.6, 128 in 10.4, 384 in 11.5; without quantising them 18.6, in float32 19.4."""


@dataclass(frozen=True)
class ModelFile:
    """A written model file.

    Attributes:
        path: the file to load; weights of more than 2 GB, or of OpenVINO, lie in a second one beside it.
        inputs, outputs: their names, in order; inputs are int64 [B, L].
        max_abs: largest absolute difference from torch over the real tokens of `COMPARED`.
        relative: norm of all differences over the norm of torch's outputs.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_abs: float
    relative: float


def export_onnx(model: PreTrainedModel, folder: Path, *, int8: bool = False) -> ModelFile:
    """Write `model.onnx`: an encoder, or one with a head for sequences, tokens or questions.

    Args:
        model: in eval mode.
        folder: made if missing.
        int8: weights in 8 bits, a scale for each output; activations are quantised as they come. Weights take 7 of
            the 8 bits: with all 8 the sums overflow on processors without VNNI.

    Raises:
        UsageError: torch cannot export this architecture.
        MachineError: a library is missing, the disk is full, or the file does not compute what torch does; nothing is
            left then.
    """
    library("onnxruntime", "onnx")
    with _aside(folder) as aside:
        file, plain = aside / "model.onnx", aside / ("float.onnx" if int8 else "model.onnx")
        inputs, outputs = _write_onnx(model, plain, "onnx")
        found = _compared(model, inputs, outputs, onnx_caller(plain, threads=0), "fp32")
        if int8:
            _quantise(plain, file)
            found = _compared(model, inputs, outputs, onnx_caller(file, threads=0), "int8")
    return ModelFile(folder / "model.onnx", inputs, outputs, *found)


def export_openvino(model: PreTrainedModel, folder: Path, *, half: bool = False, int8: bool = False) -> ModelFile:
    """Write `model.xml` and `model.bin`; the arguments and errors are those of `export_onnx`.

    Args:
        half: weights are stored in float16; OpenVINO computes in whatever it is told to.
        int8: weights of linears and embeddings in 8 bits, a scale for each output or word; on a processor with VNNI,
            activations are quantised as they come, elsewhere the weights alone save memory.
    """
    openvino = library("openvino", "openvino")
    with _aside(folder) as aside:
        inputs, outputs = _write_onnx(model, aside / "graph.onnx", "openvino")
        graph = openvino.Core().read_model(aside / "graph.onnx")
        if int8:
            _quantise_openvino(graph)
        openvino.save_model(graph, aside / "model.xml", compress_to_fp16=half)
        del graph
        for file in aside.glob("graph.onnx*"):
            file.unlink()
        call = openvino_caller(aside / "model.xml", threads=0)
        precision = "int8" if int8 else "half" if half else "fp32"
        found = _compared(model, inputs, outputs, call, precision)
    return ModelFile(folder / "model.xml", inputs, outputs, *found)


def difference(reference: Array, other: Array) -> tuple[float, float]:
    """Largest absolute difference, and the norm of the difference over that of the reference (Frobenius)."""
    reference, other = reference.astype(np.float64), other.astype(np.float64)
    gap = reference - other
    return float(np.abs(gap).max()), float(np.linalg.norm(gap) / np.linalg.norm(reference))


class _Named(nn.Module):
    """A model whose forward takes its inputs in order and gives only the named outputs."""

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        given = (input_ids, attention_mask, token_type_ids)
        found = self.model(**dict(zip(self.inputs, given, strict=False)))
        return tuple(found[name] for name in self.outputs)


def _write_onnx(model: PreTrainedModel, file: Path, extra: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write the graph in float32; returns the names of its inputs and outputs. `extra` brings the libraries."""
    assert not model.training, "a graph is recorded in eval mode"
    for name in ("onnx", "onnxscript"):
        library(name, extra)
    # Where there is one type only, an input that can be nothing but 0 would be a nuisance.
    typed = "token_type_ids" in inspect.signature(model.forward).parameters
    typed = typed and int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
    inputs = ("input_ids", "attention_mask", *(("token_type_ids",) if typed else ()))
    batch = _batch(model, inputs, *TRACED)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad(), _quietly():
        found = model(**batch)
        outputs = tuple(name for name in OUTPUTS if name in found)
        try:
            program = torch.onnx.export(
                _Named(model, inputs, outputs).eval(),
                tuple(batch.values()),
                dynamo=True,
                verbose=False,
                dynamic_shapes=(free,) * len(inputs),
                input_names=inputs,
                output_names=outputs,
            )
        except torch.onnx.OnnxExporterError as error:
            raise UsageError(
                f"torch cannot export {type(model).__name__} ({model.config.model_type}) to ONNX: {_reason(error)}",
                "every type in kdcli/models/layout.py can be exported; code of a model's own often cannot",
            ) from None
        assert program is not None
        program.save(file, external_data=sum(p.numel() * p.element_size() for p in model.parameters()) > 1 << 31)
    return inputs, outputs


def _reason(error: BaseException) -> str:
    """What went wrong at the bottom of a chain of errors, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _quantise(plain: Path, file: Path) -> None:
    """Write the int8 version of a float32 file and remove that."""
    onnx, quantization = library("onnx", "onnx"), library("onnxruntime.quantization", "onnx")
    # A linear with one row a sequence is a Gemm, which is quantised transposed; noted shapes would contradict that.
    graph = onnx.load(plain, load_external_data=False)
    graph.graph.ClearField("value_info")
    onnx.save(graph, plain)
    large = any(plain.parent.glob("*.data"))
    with _quietly():
        quantization.quantize_dynamic(
            plain,
            file,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            use_external_data_format=large,
        )
    for part in plain.parent.glob(f"{plain.name}*"):
        part.unlink()


def _quantise_openvino(graph: Any) -> None:
    """Put int8 weights and their scales in place of the float ones.

    NNCF would do the same (`compress_weights`), but it brings seven packages and reports its use over the network.
    """
    ops = library("openvino.opset13", "openvino")
    for node in graph.get_ops():
        kind = node.get_type_name()
        # A linear is a product with a constant [K, N] or [N, K]; an embedding picks rows of one.
        place = {"MatMul": 1, "Gather": 0}.get(kind)
        source = node.input_value(place).get_node() if place is not None else None
        if source is None or source.get_type_name() != "Constant":
            continue
        weight = source.get_data()
        if weight.ndim != 2 or weight.dtype != np.float32:
            continue
        summed = 0 if kind == "MatMul" and not node.get_attributes()["transpose_b"] else 1
        scale = np.abs(weight).max(axis=summed, keepdims=True) / 127
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        low = ops.constant(np.round(weight / scale).astype(np.int8))
        restored = ops.multiply(ops.convert(low, np.float32), ops.constant(scale))
        node.input(place).replace_source_output(restored.output(0))
    graph.set_rt_info(str(ACTIVATION_GROUP), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])


def _compared(
    model: PreTrainedModel, inputs: Sequence[str], outputs: Sequence[str], call: Caller, precision: str
) -> tuple[float, float]:
    """Run a file and torch on the same batches; the largest absolute difference and the relative error.

    Raises:
        MachineError: they differ by more than the precision explains.
    """
    pairs = [_outputs_of(model, call, outputs, _batch(model, inputs, *shape)) for shape in COMPARED]
    reference, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
    max_abs, relative = difference(reference, other)
    exact = EXACT * max(1.0, float(np.abs(reference).max())) if precision == "fp32" else math.inf
    # Written so that NaN fails.
    if not (max_abs <= exact and relative <= LIMITS[precision]):
        raise MachineError(
            f"the exported {type(model).__name__} does not compute what torch does: {max_abs:.2e} absolute, "
            f"{relative:.2e} relative; allowed of {precision}: {exact:.1e} and {LIMITS[precision]:g}",
            "export in full precision" if precision != "fp32" else "try other versions of onnxscript and the engine",
        )
    return max_abs, relative


def _outputs_of(model: PreTrainedModel, call: Caller, outputs: Sequence[str], batch: Batch) -> tuple[Array, Array]:
    """All numbers of torch and of the file that are not of padding, each in one vector."""
    found = call(call.feed(batch))
    with torch.no_grad():
        expected = [model(**batch)[name].float().cpu().numpy() for name in outputs]
    mask_BL = batch["attention_mask"].cpu().numpy().astype(bool)
    sides: tuple[list[Array], list[Array]] = ([], [])
    for name, theirs, ours in zip(outputs, expected, found, strict=True):
        by_token = name != "logits" or theirs.ndim == 3
        for side, x in zip(sides, (theirs, ours), strict=True):
            side.append((x[mask_BL] if by_token else x).ravel())
    return np.concatenate(sides[0]), np.concatenate(sides[1])


def _batch(model: PreTrainedModel, inputs: Sequence[str], rows: int, length: int) -> Batch:
    """Random tokens of the upper half of the vocabulary, where no special ones are; row i is shorter than row i - 1."""
    config = model.config
    length = min(length, positions_of(config) or length)
    drawn = torch.Generator().manual_seed(rows * length)
    ids_BL = torch.randint(config.vocab_size // 2, config.vocab_size, (rows, length), generator=drawn)
    place_L = torch.arange(length)
    mask_BL = (place_L < length - torch.arange(rows)[:, None] * (length // (rows + 1))).long()
    ids_BL = torch.where(mask_BL.bool(), ids_BL, config.pad_token_id or 0)
    types_BL = mask_BL * (place_L > length // 3)
    whole = {"input_ids": ids_BL, "attention_mask": mask_BL, "token_type_ids": types_BL}
    return {name: whole[name].to(model.device) for name in inputs}


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A directory inside `folder` whose files move into it when all went well; otherwise nothing stays."""
    aside, made = folder / ".export.part", not folder.exists()
    try:
        with disk_errors(folder):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            # The file that names the others goes last.
            for file in sorted(aside.iterdir(), key=lambda f: f.name in ("model.onnx", "model.xml")):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                file.replace(folder / file.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch.onnx and its helpers tell their developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
