"""Export a model to ONNX or OpenVINO, in float32 or a lower precision, and compare it with torch.

Both formats go through `torch.onnx.export`; OpenVINO reads the ONNX file. OpenVINO's own converter
produced NaN for padded ModernBERT, failed on DeBERTa, and sends telemetry. `read_model` has none of
these problems.
"""

import inspect
import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.deploy.backends import PACKED
from kdcli.deploy.calibrate import Keys, key_of_module, products
from kdcli.deploy.half import nodes_beyond_half
from kdcli.deploy.packing import pack
from kdcli.deploy.quantise import (
    NO_ROUNDINGS,
    Roundings,
    names_in_int8,
    products_of_file,
    quantise_onnx,
    quantise_openvino,
)
from kdcli.deploy.rounding import largest_pair
from kdcli.deploy.sessions import Caller, library, onnx_caller, openvino_caller
from kdcli.errors import MachineError, UsageError, first_line
from kdcli.models.embedding_format import Pool
from kdcli.models.model import has_token_types
from kdcli.models.shape import positions_of
from kdcli.types import Array, Batch

if TYPE_CHECKING:
    import onnx
    import onnx_ir
    from onnx_ir import Value
    from onnxscript.rewriter import MatchContext

MAX_SUM = 2**15 - 1
MAX_ACTIVATION = 255
HUGE = 1e30
"""The sum of two masks with larger numbers may be infinite."""
PRODUCTS = ("MatMul", "Gemm", "Einsum", "Conv")
COMPUTES_FROM_ALL = ("Add", "Sub", "Mul", "Concat")
COMPUTES_FROM_FIRST = (
    "Cast",
    "Expand",
    "Gather",
    "GatherElements",
    "GatherND",
    "Identity",
    "Neg",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
)
"""Operators whose other inputs are shapes or positions."""
FIRST, END = np.iinfo(np.int64).min, np.iinfo(np.int64).max
"""The bounds of a slice that begins or ends with its axis."""


@dataclass(frozen=True)
class LargestSum:
    """The largest sum of two neighbouring products of integers, in magnitude.

    Attributes:
        name: The linear, or the weights' name in the graph if no module has them.
        any_input: The largest sum that any input can cause.
        texts: A bound for the calibration texts, from the largest activation of each channel; None
            if they did not reach the linear.
    """

    name: str
    any_input: int
    texts: int | None

    @property
    def can_saturate(self) -> bool:
        """Whether some input can exceed 16 bits."""
        return self.any_input > MAX_SUM


def largest_sums(
    plain: Path, file: Path, model: nn.Module, roundings: Roundings
) -> list[LargestSum]:
    """Read the integers of an int8 file, and return the largest sum of each of its products.

    Args:
        plain: The float32 file from which the file was made.
        file: The int8 file.
        model: The model, which names the products.
        roundings: The roundings that were chosen on calibration texts, by key.
    """
    onnx = library("onnx", "onnx")
    names = {key_of_module(module): name for name, module in products(model).items()}
    stored = {tensor.name: tensor for tensor in onnx.load(file).graph.initializer}
    sums = {}
    for product in products_of_file(plain):
        values_OI = _integers(stored, product.weight)
        if product.is_table or values_OI is None:
            continue
        rounding = roundings.get(product.key)
        largest_I = rounding.largest_input_I if rounding is not None else None
        name = names.get(product.key, product.weight)
        sums[name] = LargestSum(
            name,
            MAX_ACTIVATION * largest_pair(values_OI),
            None if largest_I is None else largest_pair(values_OI * largest_I),
        )
    return list(sums.values())


def _integers(stored: Mapping[str, "onnx.TensorProto"], weight: str) -> Tensor | None:
    """Return the integers of a product, [out, in]; None if the file has it in float32."""
    onnx = library("onnx", "onnx")
    for name in names_in_int8(weight):
        if f"{name}_quantized" in stored:
            values_IO: Array = onnx.numpy_helper.to_array(stored[f"{name}_quantized"])
            return torch.from_numpy(values_IO.copy()).T.int()
    return None


FREE_DIMENSIONS = ("batch_size", "sequence_length")
"""Names of the dimensions of every input of a graph, as Optimum names them."""
# Batch size and number of tokens with which the graph is recorded. Both axes stay dynamic.
TRACED = (2, 24)
# The same for the comparison with torch, in which rows are padded to different lengths.
COMPARED_SHAPES = ((3, 17), (2, 150), (1, 9))
# Largest absolute difference of a float32 file, times the largest output if that exceeds 1.
EXACT = 1e-4
VECTORS = "sentence_embedding"  # the pooling's output, under the name that other tools read
# The outputs that are exported, in this order, if the model has them.
GRAPH_OUTPUTS = ("last_hidden_state", VECTORS, "start_logits", "end_logits", "logits")
BY_ROW = ("logits", VECTORS)  # one value or vector per row, unless there is a token axis
# Largest relative error of a file. all-MiniLM-L6-v2 has 1e-6, 1e-3, 0.18 and 0.33. Other weights
# give more than 1 in int8, so vectors and outputs that a task evaluates are compared on text.
FILE_LIMITS = {"fp32": 1e-3, "fp16": 0.03, "int8": 0.4, PACKED: 0.6, "q4": 0.6}
IR_VERSION = 9  # the version of opset 20, which ONNX Runtime 1.17 loads
STACK_TRACE = "pkg.torch.onnx.stack_trace"  # a node's property
RUNTIMES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Maps a format to the libraries that write and run it."""
# Maps format and precision to the file's path, which is where sentence-transformers and
# transformers.js look for it.
FILES = {
    ("onnx", "fp32"): "onnx/model.onnx",
    ("onnx", "fp16"): "onnx/model_fp16.onnx",
    ("onnx", "int8"): "onnx/model_quantized.onnx",
    # It takes the place of the int8 file, and other programs run it like that file.
    ("onnx", PACKED): "onnx/model_quantized.onnx",
    ("onnx", "q4"): "onnx/model_q4.onnx",
    ("openvino", "fp32"): "openvino/openvino_model.xml",
    ("openvino", "int8"): "openvino/openvino_model_qint8_quantized.xml",
}
# transformers.js opens `model_quantized.onnx` for the dtype q8, its default in browsers, and this
# name for the dtype int8.
SECOND_NAMES = {FILES["onnx", "int8"]: "onnx/model_int8.onnx"}


def add_second_names(folder: Path) -> None:
    """Give the files of an export their second names.

    The content is only copied where the disk has no hard links.
    """
    for name, second in SECOND_NAMES.items():
        file, link = folder / name, folder / second
        if file.is_file():
            link.unlink(missing_ok=True)
            try:
                link.hardlink_to(file)
            except OSError:
                shutil.copyfile(file, link)


@dataclass(frozen=True)
class ModelFile:
    """A written model file and its difference from torch.

    The difference covers the real tokens of batches of `COMPARED_SHAPES`.
    """

    # The file to load. OpenVINO's weights, and weights above 2 GB, are in a second file next to it.
    path: Path
    inputs: tuple[str, ...]  # names in order; each input is int64 [B, L]
    outputs: tuple[str, ...]
    max_abs: float  # largest absolute difference
    relative: float  # norm of all differences, divided by the norm of torch's outputs
    max_abs_limit: float  # the largest max_abs that was allowed; infinity for any
    relative_limit: float  # the same for relative
    sums: tuple[LargestSum, ...] = ()  # of an int8 ONNX file


@dataclass(frozen=True)
class Recorded:
    """A model's graph in float32, from which its files are written to `folder`.

    With `scored_on_text`, the caller compares the file with torch on text, so only NaN is refused
    here.
    """

    network: "_Network"
    format: str
    precision: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    plain: Path
    folder: Path
    scored_on_text: bool = False

    @property
    def file(self) -> Path:
        """The path of the file that `write` writes."""
        return self.folder / FILES[self.format, self.precision]

    def at(self, precision: str, *, scored_on_text: bool) -> "Recorded":
        """Return the same graph for another precision."""
        return replace(self, precision=precision, scored_on_text=scored_on_text)

    def write(
        self,
        in_float: Keys = frozenset(),
        roundings: Roundings = NO_ROUNDINGS,
        in_int8: Keys = frozenset(),
    ) -> ModelFile:
        """Write the file and compare it with torch.

        Products are given by `kdcli.deploy.calibrate.key_of`. Those in `in_float` keep float32
        weights, and `roundings` has the integers of the others. In fp16, `in_float` has the names
        of nodes. Those in `in_int8` are not packed.

        Raises MachineError if the file differs from torch by more than the precision explains.
        """
        openvino = library("openvino", "openvino") if self.format == "openvino" else None
        if openvino is not None:
            graph = openvino.Core().read_model(self.plain)
            if self.precision == "int8":
                quantise_openvino(graph, in_float, roundings)
            openvino.save_model(graph, self.file, compress_to_fp16=False)
            del graph
        elif self.precision != "fp32":
            with _quiet():
                quantise_onnx(self.plain, self.file, self.precision, in_float, roundings, in_int8)
        call = onnx_caller if openvino is None else openvino_caller
        limit = math.inf if self.scored_on_text else FILE_LIMITS[self.precision]
        sums: list[LargestSum] = []
        if self.format == "onnx" and self.precision in ("int8", PACKED):
            sums = largest_sums(self.plain, self.file, self.network.model, roundings)
        if self.precision == PACKED:
            pack(self.file)
        errors_and_limits = _compare(
            self.network,
            self.inputs,
            self.outputs,
            call(self.file, threads=0),
            self.precision,
            limit,
        )
        return ModelFile(self.file, self.inputs, self.outputs, *errors_and_limits, tuple(sums))

    def kept_outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of a copy of the model, and the last hidden states of its encoder."""
        encoder = model.base_model
        assert isinstance(model, PreTrainedModel)
        assert isinstance(encoder, nn.Module)
        states: list[Tensor] = []
        hook = encoder.register_forward_hook(lambda _, inputs, result: states.append(result[0]))
        try:
            result = _Network(model, self.network.pool)(
                **{name: batch[name] for name in self.inputs if name in batch}
            )
        finally:
            hook.remove()
        return {"last_hidden_state": states[0]} | {name: result[name] for name in self.outputs}

    def scored_outputs(self, batch: Batch) -> Array:
        """Return torch's outputs for the real tokens of a batch, as one vector.

        An embedding model returns only its vectors. A tokenizer may give no token types.
        """
        names = [VECTORS] if VECTORS in self.outputs else self.outputs
        result = self.network(**{name: batch[name] for name in self.inputs if name in batch})
        return without_padding(names, [result[name].float().cpu().numpy() for name in names], batch)


@contextmanager
def recorded(
    model: PreTrainedModel,
    folder: Path,
    format: str,
    precision: str = "fp32",
    *,
    pool: Pool | None = None,
    token_types: bool = True,
) -> Iterator[Recorded]:
    """Record the graph of a model in eval mode, to write its file to `folder`.

    Without `token_types`, which the model's tokenizer does not return, they are no input of the
    file: programs that read tokenizer.json alone would pass the types of its template.

    The model is an encoder, or has a head for sequences, tokens or questions. With `pool`, an
    encoder also returns `sentence_embedding`. The folder is created if it is missing. From a graph
    recorded for `fp32`, files of other precisions can be written next to the first one (see
    `Recorded.at`). After an error, the folder may hold unusable files.

    Raises UsageError if torch cannot export the architecture, MachineError if a library is missing
    or the graph differs from torch, and OSError if the folder cannot be written.
    """
    for name in RUNTIMES[format]:
        library(name, format)
    file = folder / FILES[format, precision]
    plain = file if (format, precision) == ("onnx", "fp32") else file.with_name("graph.onnx")
    network = _Network(model, pool)
    inputs, outputs = _write_onnx(network, plain, token_types=token_types)
    if format == "onnx" and precision != "fp32":
        _compare(
            network, inputs, outputs, onnx_caller(plain, threads=0), "fp32", FILE_LIMITS["fp32"]
        )
    yield Recorded(network, format, precision, inputs, outputs, plain, folder)
    if plain != file:
        for part in plain.parent.glob(f"{plain.name}*"):
            part.unlink()


def export_model(
    model: PreTrainedModel, folder: Path, format: str, precision: str = "fp32"
) -> ModelFile:
    """Write a model's file to its place under `folder` (see `FILES`).

    * int8: weights of linears and embeddings in 8 bits, with one scale per output or word.
      Activations are quantised at run time (in OpenVINO, only with VNNI).
    * int8-packed: the same with weights stored in about half the size; see `kdcli.deploy.packing`.
    * q4: weights in 4 bits, with one scale per 32 weights.

    Raises UsageError if torch cannot export the architecture, MachineError if a library is missing
    or the file differs from torch by more than the precision explains, and OSError if the folder
    cannot be written.
    """
    with recorded(model, folder, format, precision) as graph:
        if precision != "fp16":
            return graph.write()
        random = [_batch(model, graph.inputs, *shape) for shape in COMPARED_SHAPES]
        return graph.write(nodes_beyond_half(graph.plain, random))


def difference(reference: Array, other: Array) -> tuple[float, float]:
    """Return the largest absolute difference and the relative error.

    The relative error is the Frobenius norm of the difference, divided by the reference's norm.
    """
    reference, other = reference.astype(np.float64), other.astype(np.float64)
    gap = reference - other
    return float(np.abs(gap).max()), float(np.linalg.norm(gap) / np.linalg.norm(reference))


class _Network(nn.Module):
    """A model with its pooling, if it has one: inputs by name -> outputs by name."""

    def __init__(self, model: PreTrainedModel, pool: Pool | None) -> None:
        super().__init__()
        self.model, self.pool = model, pool

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        outputs = dict(self.model(**inputs))
        if self.pool is not None:
            outputs[VECTORS] = self.pool.compute(
                outputs["last_hidden_state"], inputs["attention_mask"]
            )
        return outputs


class _PositionalInputs(nn.Module):
    """A model with positional inputs that returns only the named outputs."""

    def __init__(self, model: _Network, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        values = (input_ids, attention_mask, token_type_ids)
        outputs = self.model(**dict(zip(self.inputs, values, strict=False)))
        return tuple(outputs[name] for name in self.outputs)


def _write_onnx(
    network: _Network, file: Path, *, token_types: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write the graph in float32 and return the names of its inputs and outputs."""
    model = network.model
    assert not model.training, "a graph must be recorded in eval mode"
    file.parent.mkdir(parents=True, exist_ok=True)
    # With a single token type, the input could only be 0.
    typed = "token_type_ids" in inspect.signature(model.forward).parameters
    typed = typed and token_types and has_token_types(model.config)
    inputs = ("input_ids", "attention_mask", *(("token_type_ids",) if typed else ()))
    batch = _batch(model, inputs, *TRACED)
    # The names make the dimensions of all inputs equal. Without them, torch may give the rows of
    # the mask a dimension of their own.
    free = dict(enumerate(FREE_DIMENSIONS))
    with torch.no_grad(), _quiet():
        result = network(**batch)
        outputs = tuple(name for name in GRAPH_OUTPUTS if name in result)
        try:
            positional = _PositionalInputs(network, inputs, outputs).eval()
            args = tuple(batch.values())
            shapes = (free,) * len(inputs)
            program = torch.onnx.export(
                positional,
                args,
                dynamo=True,
                verbose=False,
                dynamic_shapes=shapes,
                input_names=inputs,
                output_names=outputs,
            )
        except torch.onnx.OnnxExporterError as error:
            raise UsageError(
                f"torch cannot export {type(model).__name__} ({model.config.model_type}) to ONNX: "
                f"{_root_cause(error)}",
                "a graph holds no code that reads the values of its inputs, and no operator that "
                "ONNX lacks; distil its vectors into a model that can be exported: --to "
                "static:256, or --student MODEL",
            ) from None
        assert program is not None
        simplify(program.model)
        # ONNX Runtime refuses files of a newer IR version than it knows.
        program.model.ir_version = IR_VERSION
        nodes = list(program.model.graph.all_nodes())
        for function in program.model.functions.values():
            nodes += function.all_nodes()
        for node in nodes:
            # A stack trace names files of this machine.
            node.metadata_props.pop(STACK_TRACE, None)
        for value in program.model.graph.initializers.values():
            # Other programs may transpose weights, and then a recorded shape would contradict them.
            # The weights have their shapes anyway.
            value.shape = value.type = None
        program.save(
            file,
            external_data=model.get_memory_footprint(return_buffers=False) > 1 << 31,
        )
    return inputs, outputs


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def _compare(
    network: _Network,
    inputs: Sequence[str],
    outputs: Sequence[str],
    call: Caller,
    precision: str,
    limit: float,
) -> tuple[float, float, float, float]:
    """Run a file and torch on the same batches.

    Returns the largest absolute difference, the relative error, and the limit of each. Raises
    MachineError if they exceed what the precision explains.
    """
    model = network.model
    pairs = [
        _outputs_of(network, call, outputs, _batch(model, inputs, *shape))
        for shape in COMPARED_SHAPES
    ]
    reference, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
    if not np.isfinite(reference).all():
        raise UsageError(
            f"the {type(model).__name__} computes NaN or infinity in torch",
            "check its weights: they may be damaged, or the training may have failed",
        )
    max_abs, relative = difference(reference, other)
    exact = EXACT * max(1.0, float(np.abs(reference).max())) if precision == "fp32" else math.inf
    # The conditions are written so that NaN fails.
    if not (max_abs <= exact and relative <= limit) or not math.isfinite(relative):
        raise MachineError(
            f"the exported {type(model).__name__} does not compute what torch does: it differs by "
            f"{max_abs:.2e} (absolute) and {relative:.2e} (relative); allowed for {precision}: "
            f"{exact:.1e} and {limit:g}",
            "export in full precision"
            if precision != "fp32"
            else "try other versions of onnxscript and the engine",
        )
    return max_abs, relative, exact, limit


def _outputs_of(
    network: _Network, call: Caller, outputs: Sequence[str], batch: Batch
) -> tuple[Array, Array]:
    """Return the outputs of torch and of the file without padding, each as one vector."""
    by_file = call(call.feed(batch))
    with torch.no_grad():
        result = network(**batch)
        by_torch = [result[name].float().cpu().numpy() for name in outputs]
    return without_padding(outputs, by_torch, batch), without_padding(outputs, by_file, batch)


def without_padding(names: Sequence[str], arrays: Sequence[Array], batch: Batch) -> Array:
    """Return outputs without padding, as one vector."""
    mask_BL = batch["attention_mask"].cpu().numpy().astype(bool)
    tokens = [name not in BY_ROW or x.ndim == 3 for name, x in zip(names, arrays, strict=True)]
    return np.concatenate(
        [(x[mask_BL] if t else x).ravel() for x, t in zip(arrays, tokens, strict=True)]
    )


def _batch(model: PreTrainedModel, inputs: Sequence[str], rows: int, length: int) -> Batch:
    """Return random tokens from the upper half of the vocabulary.

    Row i is shorter than row i - 1.
    """
    config = model.config
    length = min(length, positions_of(config) or length)
    drawn = torch.Generator().manual_seed(rows * length)
    ids_BL = torch.randint(
        config.vocab_size // 2, config.vocab_size, (rows, length), generator=drawn
    )
    place_L = torch.arange(length)
    mask_BL = (place_L < length - torch.arange(rows)[:, None] * (length // (rows + 1))).long()
    ids_BL = torch.where(mask_BL.bool(), ids_BL, config.pad_token_id or 0)
    types_BL = mask_BL * (place_L > length // 3)
    arrays = {"input_ids": ids_BL, "attention_mask": mask_BL, "token_type_ids": types_BL}
    return {name: arrays[name].to(model.device) for name in inputs}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings and logs of torch.onnx and ONNX Runtime, meant for their developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    # Without a handler, `logging.warning` adds one, and a later `logging.basicConfig` does nothing.
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.root.removeHandler(handler)
        logging.disable(before)


def simplify(model: "onnx_ir.Model") -> None:
    """Remove nodes that attention does not need, in place.

    * torch replaces NaN probabilities by zeros, because the softmax of a row of -inf is NaN. With
      finite masks, no row is all -inf.
    * torch swaps the last two axes of the keys by three nodes and by the computation of two shapes.
      ONNX Runtime fuses a single `Transpose` with the product that reads it.
    """
    rewriter = library("onnxscript.rewriter", "onnx")
    # Each rule has a pattern, its replacement and a condition.
    rules = [
        rewriter.RewriteRule(_guarded_softmax, _softmax, _is_finite),
        rewriter.RewriteRule(_swap_by_shapes, _swap, _has_four_axes),
    ]
    rewriter.rewrite(model, pattern_rewrite_rules=rules)


def _guarded_softmax(op: Any, scores: "Value", zero: "Value") -> Any:
    probabilities = op.Softmax(scores, axis=-1)
    return op.Where(op.IsNaN(probabilities), zero, probabilities)


def _softmax(op: Any, scores: "Value", zero: "Value") -> Any:
    return op.Softmax(scores, axis=-1)


def _is_finite(context: "MatchContext", scores: "Value", **others: "Value") -> bool:
    """Return whether no mask makes a whole row of scores infinite."""
    return _huge_terms(scores) <= 1


def _huge_terms(value: "Value | None") -> float:
    """Return how many huge numbers an element of a tensor may be the sum of.

    The result is infinite if the tensor may hold infinite numbers, or is computed by an operator
    that is not known here.
    """
    if value is None:
        return 0  # An optional input that is absent.
    constant = library("onnx_ir.convenience", "onnx").get_const_tensor(value)
    if constant is not None:
        numbers = constant.numpy()
        return math.inf if np.isinf(numbers).any() else int((np.abs(numbers) > HUGE).any())
    node = value.producer()
    if node is None or node.op_type in PRODUCTS:
        return 0  # Inputs of the model and products of finite numbers are small.
    if node.op_type in COMPUTES_FROM_ALL:
        return sum(map(_huge_terms, node.inputs))
    if node.op_type in COMPUTES_FROM_FIRST:
        return _huge_terms(node.inputs[0])
    if node.op_type == "Where":
        return max(map(_huge_terms, node.inputs[1:]))
    return math.inf


def _swap_by_shapes(
    op: Any,
    keys: "Value",
    first: "Value",
    second_last: "Value",
    last: "Value",
    end: "Value",
    rest: "Value",
) -> Any:
    shape = op.Shape(keys, start=0)
    width = op.Slice(shape, last, end)
    length = op.Slice(shape, second_last, last)
    outer = op.Slice(shape, first, second_last)
    heads = op.Reshape(keys, op.Concat(rest, length, width, axis=0))
    swapped = op.Transpose(heads, perm=[0, 2, 1])
    return op.Reshape(swapped, op.Concat(outer, width, length, axis=0))


def _swap(op: Any, keys: "Value", **bounds: "Value") -> Any:
    return op.Transpose(keys, perm=[0, 1, 3, 2])


def _has_four_axes(context: "MatchContext", keys: "Value", **bounds: "Value") -> bool:
    """Return whether there is one axis of heads, and the slices are the last two lengths and the
    lengths before them."""
    wanted = {"first": FIRST, "second_last": -2, "last": -1, "end": END, "rest": -1}
    constant_of = library("onnx_ir.convenience", "onnx").get_const_tensor
    constants = {name: constant_of(value) for name, value in bounds.items()}
    return (
        keys.shape is not None
        and len(keys.shape) == 4
        and all(
            tensor is not None and tensor.numpy().tolist() == [wanted[name]]
            for name, tensor in constants.items()
        )
    )
