"""Write a recorded graph in integers or half precision."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kdcli.deploy.backends import PACKED
from kdcli.deploy.calibrate import (
    ACTIVATION_GROUP,
    SMALL_TABLE,
    Keys,
    Rounding,
    key_of,
    round_table,
)
from kdcli.deploy.codebook import packed_grid
from kdcli.deploy.folding import Folding
from kdcli.deploy.half import in_half
from kdcli.deploy.rounding import (
    INT4_BLOCKS,
    INT8_PAIRS,
    LIMIT,
    Grid,
    Integers,
    round_weight,
)
from kdcli.deploy.sessions import library
from kdcli.errors import MachineError
from kdcli.types import Array

if TYPE_CHECKING:
    import onnx
    import openvino
    from onnx import NodeProto

Roundings = Mapping[str, Rounding]
"""Maps the key of a product's weights to its rounding."""
NO_ROUNDINGS: Roundings = {}
LOGGERS = ("onnxruntime.quantization.matmul_nbits_quantizer", "onnxruntime.transformers.float16")


def quantise_onnx(
    plain: Path,
    file: Path,
    precision: str,
    in_float: Keys = frozenset(),
    roundings: Roundings = NO_ROUNDINGS,
    in_int8: Keys = frozenset(),
) -> None:
    """Write a float32 ONNX file in `int8`, `fp16` or `q4`.

    For `int8-packed`, the file is in int8, and its integers can be packed.

    Args:
        plain: The float32 file.
        file: The file to write.
        precision: The precision of its weights.
        in_float: The keys of products that keep their float32 weights; in `fp16`, the names of
            nodes.
        roundings: The integers of products by key. The weights of other products are rounded to the
            nearest integers. A table has one scale per row.
        in_int8: For `int8-packed`, the keys of products that are rounded as in `int8`.
    """
    onnx = library("onnx", "onnx")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    large = any(plain.parent.glob(f"{plain.name}.data"))
    is_int8 = precision in ("int8", PACKED)
    graph = onnx.load(plain, load_external_data=not is_int8)
    # The shapes of the float32 graph need not hold for the nodes that replace its nodes.
    graph.graph.ClearField("value_info")
    if is_int8:
        choice = _Integers8(in_float, roundings, precision == PACKED, in_int8)
        _write_int8(graph, plain, file, large, choice)
    elif precision == "fp16":
        save_graph(in_half(graph, in_float, large=large), file, large)
    else:
        save_graph(_in_4_bits(graph, plain.parent, in_float, roundings), file, large)


def save_graph(graph: "onnx.ModelProto", file: Path, large: bool) -> None:
    """Write a graph, with its weights in a second file if they are large."""
    onnx = library("onnx", "onnx")
    weights = file.with_name(f"{file.name}.data")
    weights.unlink(missing_ok=True)  # onnx would append to it
    onnx.save(graph, file, save_as_external_data=large, location=weights.name)


def _write_int8(
    graph: "onnx.ModelProto",
    plain: Path,
    file: Path,
    large: bool,
    choice: "_Integers8",
) -> None:
    """Write a graph in int8.

    ONNX Runtime's quantiser changes the nodes. Its integers are then replaced by those of
    the roundings or, for the other products, by the nearest ones that no processor's sums saturate.
    """
    onnx = library("onnx", "onnx")
    _separate_gemms(graph)
    products = list(_products(graph, plain.parent))
    kept = [
        name for product in products if product.key in choice.in_float for name in product.names
    ]
    grid = _packed_grid(products) if choice.can_be_packed else INT8_PAIRS
    rounded = {
        product.weight: choice.rounding(product, grid)
        for product in products
        if not product.is_table and product.key not in choice.in_float
    }
    # The quantiser would round a whole table with one scale, the largest entry's.
    kept += _round_tables(graph, plain.parent, choice)
    rounded = _smooth(graph, plain.parent, rounded, kept)
    by_row = plain.with_name(f"by_row_{plain.name}")
    onnx.save(graph, by_row)
    quantization = library("onnxruntime.quantization", "onnx")
    settings = {
        "weight_type": quantization.QuantType.QInt8,
        "per_channel": True,
        "reduce_range": True,  # for convolutions, whose integers are not replaced
    }
    quantization.quantize_dynamic(
        by_row, file, use_external_data_format=large, nodes_to_exclude=kept, **settings
    )
    by_row.unlink()
    quantised = onnx.load(file)
    tensors = {tensor.name: tensor for tensor in quantised.graph.initializer}
    for weight, rounding in rounded.items():
        name = next((n for n in names_in_int8(weight) if f"{n}_quantized" in tensors), None)
        if name is None:
            raise MachineError(
                f"ONNX Runtime left the product with the weights {weight} in float32",
                "use another version of onnxruntime, or export without --int8",
            )
        values_IO = rounding.integers.values_OI.T.contiguous().numpy()
        _replace(tensors[f"{name}_quantized"], values_IO)
        _replace(tensors[f"{name}_scale"], rounding.integers.scale_OG[:, 0].numpy())
    _keep_normalisations_apart(quantised)
    save_graph(quantised, file, large)


def _keep_normalisations_apart(graph: "onnx.ModelProto") -> None:
    """Write the sums before normalisations as `Sum`, which means the same as `Add`.

    ONNX Runtime fuses an `Add` with the normalisation that reads it. On a CPU, the fused operator
    takes several times as long as the separate operators (docs/evidence/int8.md).
    """
    constants = {tensor.name for tensor in graph.graph.initializer}
    normalised = {
        node.input[0] for node in graph.graph.node if node.op_type == "LayerNormalization"
    }
    for node in graph.graph.node:
        is_residual = node.op_type == "Add" and not constants & set(node.input)
        if is_residual and node.output[0] in normalised:
            node.op_type = "Sum"


def names_in_int8(weight: str) -> tuple[str, str]:
    """Return the names that ONNX Runtime's quantiser may give to a weight of a product."""
    return weight, f"{weight}_Transposed"


def _separate_gemms(graph: "onnx.ModelProto") -> None:
    """Give each Gemm weights of its own. The quantiser transposes shared ones more than once."""
    weights = {tensor.name: tensor for tensor in graph.graph.initializer}
    used = set()
    for node in graph.graph.node:
        if node.op_type != "Gemm" or node.input[1] not in weights:
            continue
        if node.input[1] in used:
            own = graph.graph.initializer.add()
            own.CopyFrom(weights[node.input[1]])
            own.name = node.input[1] = f"{own.name}_of_{node.name}"
        used.add(node.input[1])


@dataclass(frozen=True)
class _Integers8:
    """The integers of an int8 file.

    Attributes:
        in_float: The keys of products that keep their float32 weights.
        roundings: The roundings of products by key.
        can_be_packed: Whether weights that are not in `roundings` are rounded so that they can be
            packed.
        in_int8: The keys of products that are rounded to plain int8 instead.
    """

    in_float: Keys
    roundings: Roundings
    can_be_packed: bool
    in_int8: Keys

    def rounding(self, product: "GraphProduct", grid: Grid) -> Rounding:
        """Return a linear's rounding. Without a calibrated one, round to `grid`."""
        grid = INT8_PAIRS if product.key in self.in_int8 else grid
        return self.roundings.get(product.key) or Rounding(_nearest(product.matrix_OI(), grid))

    def round_table(self, x_VH: Array) -> tuple[Array, Array] | None:
        """Return the integers of a table and the scale of each row.

        Returns None if the table stays in float32.
        """
        if len(x_VH) <= SMALL_TABLE:
            return None
        key = key_of(x_VH) if self.in_float or self.can_be_packed else ""
        if key in self.in_float:
            return None
        if self.can_be_packed and key not in self.in_int8:
            known = self.roundings.get(key)
            integers = known.integers if known else round_table(torch.from_numpy(x_VH.copy()))
            return integers.values_OI.numpy(), integers.scale_OG.numpy()
        largest_V1 = np.abs(x_VH).max(axis=1, keepdims=True)
        scale_V1 = np.where(largest_V1 > 0, largest_V1 / LIMIT, 1).astype(np.float32)
        return np.round(x_VH / scale_V1).astype(np.int8), scale_V1


def _nearest(weight_OI: Array, grid: Grid) -> Integers:
    return round_weight(torch.from_numpy(weight_OI.copy()), grid)


def _replace(tensor: "onnx.TensorProto", values: Array) -> None:
    """Replace the values of a tensor, which keeps its name, type and shape."""
    onnx = library("onnx", "onnx")
    old = onnx.numpy_helper.to_array(tensor)
    new = np.ascontiguousarray(values, old.dtype).reshape(old.shape)
    tensor.CopyFrom(onnx.numpy_helper.from_array(new, tensor.name))


def _smooth(
    graph: "onnx.ModelProto",
    folder: Path,
    rounded: Mapping[str, Rounding],
    in_float: Sequence[str],
) -> dict[str, Rounding]:
    """Divide the inputs of smoothed products by their divisors.

    A division costs time, so it is folded into the weights that compute the input if possible.

    Args:
        graph: The float32 graph.
        folder: The folder of its external weights.
        rounded: The roundings by the name of the weights in the graph.
        in_float: The names of the nodes that are not rounded.

    Returns:
        The roundings after the divisions that were folded into their scales.
    """
    onnx = library("onnx", "onnx")
    result = dict(rounded)
    smoothed: dict[tuple[str, bytes], list[NodeProto]] = {}
    for node in graph.graph.node:
        rounding = rounded.get(node.input[1]) if _is_linear(node) else None
        if rounding is not None and rounding.smoothing_I is not None and node.name not in in_float:
            inverse_I = (1 / rounding.smoothing_I).numpy()
            smoothed.setdefault((node.input[0], inverse_I.tobytes()), []).append(node)
    folding = Folding(graph, folder)
    products: dict[str, NodeProto] = {}
    for (name, data), readers in smoothed.items():
        inverse_I = np.frombuffer(data, np.float32)
        folded = folding.multiply(name, len(readers), inverse_I)
        if folded is not None:
            for weight in rounded.keys() & set(folded):
                result[weight] = result[weight].with_outputs(torch.from_numpy(inverse_I.copy()))
            continue
        new = f"{name}_smoothed_{len(products)}"
        factor = onnx.numpy_helper.from_array(inverse_I, f"{new}_factor")
        graph.graph.initializer.append(factor)
        products[readers[0].name] = onnx.helper.make_node(
            "Mul", [name, factor.name], [new], name=f"{new}_product"
        )
        for node in readers:
            node.input[0] = new
    nodes = []
    for node in graph.graph.node:
        if node.name in products:
            nodes.append(products[node.name])
        nodes.append(node)
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    return result


def _in_4_bits(
    graph: "onnx.ModelProto", folder: Path, in_float: Keys, roundings: Roundings
) -> "onnx.ModelProto":
    """Return a graph with weights in 4 bits."""
    products = list(_products(graph, folder))
    kept = [
        name
        for product in products
        if product.key in in_float or (product.is_table and len(product.array) <= SMALL_TABLE)
        for name in product.names
    ]
    tool = library("onnxruntime.quantization.matmul_nbits_quantizer", "onnx")
    block = INT4_BLOCKS.block
    config = tool.DefaultWeightOnlyQuantConfig(
        block_size=block,
        is_symmetric=True,
        quant_axes=(("MatMul", 0), ("Gather", 1)),
        op_types_to_quantize=("MatMul", "Gather"),
    )
    quantizer = tool.MatMulNBitsQuantizer(graph, nodes_to_exclude=kept, algo_config=config)
    quantizer.process()
    quantised: onnx.ModelProto = quantizer.model.model
    tensors = {tensor.name: tensor for tensor in quantised.graph.initializer}
    for product in products:
        rounding = None if product.is_table else roundings.get(product.key)
        packed = tensors.get(f"{product.weight}_Q4")
        # A Gemm stays in float32.
        if rounding is not None and packed is not None:
            _replace(packed, _packed(rounding.integers))
            _replace(tensors[f"{product.weight}_scales"], rounding.integers.scale_OG.numpy())
    return quantised


def _packed(integers: Integers) -> Array:
    """Return integers in 4 bits, two in a byte and the first in the lower half, as [O, G, bytes].

    They are stored with an offset of 8.
    """
    values_OI = integers.values_OI
    padding = integers.scale_OG.shape[1] * integers.block - values_OI.shape[1]
    stored_OI = np.pad(values_OI.numpy(), ((0, 0), (0, padding))).astype(np.uint8) + 8
    pairs_OGN2 = stored_OI.reshape(*integers.scale_OG.shape, -1, 2)
    packed: Array = pairs_OGN2[..., 0] | (pairs_OGN2[..., 1] << 4)
    return packed


@dataclass(frozen=True)
class GraphProduct:
    """A product of an ONNX graph with constant weights.

    Attributes:
        names: The name of its node, and the names that ONNX Runtime gives it.
        weight: The name of its weights.
        is_table: Whether it gathers rows of a table.
        key: The key of the matrix.
        array: The weights as the graph holds them.
        transposed: Whether the graph holds [in, out].
    """

    names: tuple[str, ...]
    weight: str
    is_table: bool
    key: str
    array: Array
    transposed: bool = False

    def matrix_OI(self) -> Array:
        """Return the weights, [out, in]."""
        return self.array.T if self.transposed else self.array


def _is_linear(node: "onnx.NodeProto") -> bool:
    """Return whether a node multiplies an input by weights, and perhaps adds a bias.

    The quantiser leaves a Gemm that also scales its parts or transposes its input in float32.
    """
    if node.op_type == "MatMul":
        return True
    values = {a.name: a.f or a.i for a in node.attribute if a.name != "transB"}
    return node.op_type == "Gemm" and all(
        value == (0 if name == "transA" else 1) for name, value in values.items()
    )


def _packed_grid(products: Sequence[GraphProduct]) -> Grid:
    """Return the integers of the packed matrices of a file."""
    of_weights = {product.weight: product for product in products}.values()
    matrices = [product.array.size for product in of_weights if not product.is_table]
    tables = [product.array.shape for product in of_weights if product.is_table]
    return packed_grid(sum(matrices), tables)


def products_of_file(plain: Path) -> Iterator[GraphProduct]:
    """Yield the products of a float32 ONNX file."""
    onnx = library("onnx", "onnx")
    return _products(onnx.load(plain, load_external_data=False), plain.parent)


def _products(graph: "onnx.ModelProto", folder: Path) -> Iterator[GraphProduct]:
    """Yield the products of an ONNX graph."""
    onnx = library("onnx", "onnx")
    weights = {tensor.name: tensor for tensor in graph.graph.initializer if len(tensor.dims) == 2}
    for node in graph.graph.node:
        if _is_linear(node) and node.input[1] in weights:
            name = node.input[1]
            array = onnx.numpy_helper.to_array(weights[name], base_dir=str(folder))
            turned = not any(a.name == "transB" and a.i for a in node.attribute)
            key = key_of(array.T if turned else array)
            # ONNX Runtime renames a Gemm before it quantises.
            names = node.name, f"{node.name}_MatMul"
            yield GraphProduct(names, name, False, key, array, turned)
        elif node.op_type == "Gather" and node.input[0] in weights:
            name = node.input[0]
            array = onnx.numpy_helper.to_array(weights[name], base_dir=str(folder))
            yield GraphProduct((node.name,), name, True, key_of(array), array)


def _round_tables(graph: "onnx.ModelProto", folder: Path, choice: _Integers8) -> list[str]:
    """Round the float32 tables of an ONNX graph to int8, with one scale per row.

    A table is gathered in int8, and multiplied by the gathered scales. Small tables and those
    that the choice names stay in float32.

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
        low, scale = f"{table}_int8", f"{table}_row_scale"
        if table not in rounded:
            x_VH = array_of(tables[table], base_dir=str(folder))
            integers = choice.round_table(x_VH)
            if integers is None:
                continue
            low_VH, scale_V1 = integers
            graph.graph.initializer.extend([tensor_of(low_VH, low), tensor_of(scale_V1, scale)])
            rounded.add(table)
        ids, result = node.input[1], node.output[0]
        low_rows, scales, rows = f"{result}_int8", f"{result}_row_scale", f"{result}_cast"
        gathers.append(f"{node.name}_row_scale")
        make_node = onnx.helper.make_node
        nodes[-1:] = [
            make_node("Gather", [low, ids], [low_rows], name=node.name),
            make_node("Gather", [scale, ids], [scales], name=gathers[-1]),
            make_node("Cast", [low_rows], [rows], name=f"{node.name}_cast", to=floats),
            make_node("Mul", [rows, scales], [result], name=f"{node.name}_product"),
        ]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    unused = rounded - {name for node in nodes for name in node.input}
    weights = [tensor for tensor in graph.graph.initializer if tensor.name not in unused]
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(weights)
    return gathers


def quantise_openvino(
    graph: "openvino.Model",
    in_float: Keys = frozenset(),
    roundings: Roundings = NO_ROUNDINGS,
) -> None:
    """Replace float weights by int8 weights and scales.

    This is NNCF's `compress_weights` without its telemetry. Products in `in_float` keep their
    weights. `roundings` has the integers of products by key; the other weights are rounded to the
    nearest integers.
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
        if kind == "Gather" and len(weight) <= SMALL_TABLE:
            continue
        summed = 0 if kind == "MatMul" and not node.get_attributes()["transpose_b"] else 1
        key = key_of(weight if summed else weight.T)
        if key in in_float:
            continue
        rounding = roundings.get(key) if kind == "MatMul" else None
        if rounding is None:
            scale = np.abs(weight).max(axis=summed, keepdims=True) / LIMIT
            scale = np.where(scale > 0, scale, 1).astype(np.float32)
            low = np.round(weight / scale).astype(np.int8)
        else:
            low, scale = rounding.integers.values_OI.numpy(), rounding.integers.scale_OG.numpy()
            low, scale = (low, scale) if summed else (low.T, scale.T)
        integers = ops.constant(np.ascontiguousarray(low))
        restored = ops.multiply(ops.convert(integers, np.float32), ops.constant(scale))
        node.input(place).replace_source_output(restored.output(0))
    graph.set_rt_info(str(ACTIVATION_GROUP), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
