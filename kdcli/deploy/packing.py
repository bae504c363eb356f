"""Store the weights of an int8 ONNX file in fewer bits.

The integers of a matrix are numbers of a small range times a factor for each block: the file holds
the factors, and several numbers in 16 bits. A table whose rows repeat few triples is stored as a
code for each triple and a codebook; rows with other triples are stored as they are.

A few standard nodes compute the integers again. They read only constants, so ONNX Runtime runs them
when it opens the file, and what runs afterwards is the int8 graph.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdcli.deploy.codebook import CODED_ROWS, CODES, GROUP
from kdcli.deploy.quantise import save_graph
from kdcli.deploy.rounding import BLOCK, block_factors
from kdcli.deploy.sessions import library
from kdcli.errors import UsageError
from kdcli.types import Array

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

LEVELS = {4: 16, 3: 40}
"""Number of integers that share 16 bits -> number of values that each may have."""


def pack(file: Path) -> None:
    """Pack the weights of an int8 ONNX file in place.

    Weights of another form stay as they are.

    Raises:
        UsageError: No weight can be packed.
    """
    onnx = library("onnx", "onnx")
    model = onnx.load(file)
    graph = model.graph
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    constants: list[TensorProto] = []
    nodes: list[NodeProto] = []
    widths: set[int] = set()
    rows: set[int] = set()
    for tensor in graph.initializer:
        packing = None
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 2:
            values, is_table = onnx.numpy_helper.to_array(tensor), tensor.name in tables
            packing = _Packing(tensor.name)
            is_packed = packing.add_table(values) if is_table else packing.add_matrix(values)
            (rows if is_table else widths).add(len(values))
        if packing is None or not is_packed:
            constants.append(tensor)
            continue
        constants += packing.constants
        nodes += packing.nodes
    if not nodes:
        why = _reason(widths, rows)
        raise UsageError(f"nothing can be packed: {why}", "export with --int8 alone")
    nodes += graph.node
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(constants)
    graph.node.extend(nodes)
    save_graph(model, file, any(file.parent.glob(f"{file.name}.data")))


class _Packing:
    """The constants and nodes that replace a weight.

    Attributes:
        name: The name of the weight, which the last node computes.
        constants: The constants.
        nodes: The nodes.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.constants: list[TensorProto] = []
        self.nodes: list[NodeProto] = []

    def add_matrix(self, values_IO: Array) -> bool:
        """Store a matrix as digits and factors. Return False if it is not of this form."""
        if len(values_IO) % BLOCK:
            return False
        blocks_GNO = values_IO.reshape(-1, BLOCK, values_IO.shape[1])
        divided = _divide(blocks_GNO)
        if divided is None:
            return False
        count, digits_GNO, factors_G1O = divided
        levels = LEVELS[count]
        size = -(-digits_GNO.size // count)
        digits_DW = np.zeros((count, size), np.uint32)
        digits_DW.flat[: digits_GNO.size] = digits_GNO.ravel()
        powers_D1 = (levels ** np.arange(count, dtype=np.uint32))[:, None]
        words_W = (digits_DW * powers_D1).sum(0).astype(np.uint16)
        wide = self.node("Cast", self.constant("words", words_W), to="INT32")
        base = self.constant("levels", np.array(levels, np.int32))
        digits = []
        for n in range(count):
            digits.append(self.node("Mod", wide, base) if n < count - 1 else wide)
            wide = self.node("Div", wide, base) if n < count - 1 else wide
        joined = self.node("Concat", *digits, axis=0)
        if digits_DW.size > digits_GNO.size:
            joined = self.cut(joined, digits_GNO.size, axis=0)
        blocks = self.node("Reshape", joined, self.constant("blocks", blocks_GNO.shape))
        signed = self.node("Sub", blocks, self.constant("offset", np.array(levels // 2, np.int32)))
        # ONNX Runtime multiplies no 8-bit integers on a CPU.
        factors = self.node("Cast", self.constant("factors", factors_G1O), to="INT32")
        low = self.node("Cast", self.node("Mul", signed, factors), to="INT8")
        self.node("Reshape", low, self.constant("shape", values_IO.shape), is_last=True)
        return True

    def add_table(self, values_VH: Array) -> bool:
        """Store a table as codes and a codebook. Return False if it is not of this form."""
        rows, width = values_VH.shape
        if rows < CODED_ROWS:
            return False
        # Rows that keep 8 bits per number must not take the codewords' places.
        *_, missing_V = _codes(values_VH, np.full(rows, True))
        is_coded_V = 2 * missing_V < -(-width // GROUP)
        if 2 * np.count_nonzero(is_coded_V) < rows:
            return False
        books_SCG, codes_VS, missing_V = _codes(values_VH, is_coded_V)
        exact_K = np.flatnonzero(missing_V)
        if 2 * len(exact_K) > rows:
            return False
        wide = self.node("Cast", self.constant("codes", codes_VS), to="INT32")
        offsets_S = CODES * np.arange(len(books_SCG), dtype=np.int32)
        places = self.node("Add", wide, self.constant("offsets", offsets_S))
        book = self.constant("codebook", np.concatenate(books_SCG))
        triples = self.node("Gather", book, places)
        padded_width = GROUP * len(books_SCG)
        is_cut, is_exact = padded_width > width, len(exact_K) > 0
        shape = self.constant("shape", (rows, padded_width))
        result = self.node("Reshape", triples, shape, is_last=not is_cut and not is_exact)
        if is_cut:
            result = self.cut(result, width, axis=1, is_last=not is_exact)
        if is_exact:
            numbers = self.constant("exact_numbers", exact_K[:, None])
            exact = self.constant("exact", values_VH[exact_K])
            self.node("ScatterND", result, numbers, exact, is_last=True)
        return True

    def constant(self, suffix: str, values: Array | tuple[int, ...]) -> str:
        """Add a constant, and return its name."""
        onnx, name = library("onnx", "onnx"), f"{self.name}_{suffix}"
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, kind: str, *inputs: str, is_last: bool = False, **settings: str | int) -> str:
        """Add a node, and return the name of its result."""
        onnx = library("onnx", "onnx")
        name = self.name if is_last else f"{self.name}_{kind}_{len(self.nodes)}"
        if (to := settings.get("to")) is not None:
            settings["to"] = onnx.TensorProto.DataType.Value(to)
        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [name], **settings))
        return name

    def cut(self, name: str, size: int, axis: int, *, is_last: bool = False) -> str:
        """Add a node that keeps the first values of an axis, and return the name of its result."""
        ends = {"begin": [0], "end": [size], "axis": [axis]}
        words = [self.constant(suffix, np.array(value)) for suffix, value in ends.items()]
        return self.node("Slice", name, *words, is_last=is_last)


def _reason(widths: set[int], rows: set[int]) -> str:
    """Return why no int8 weight can be packed.

    Args:
        widths: The number of inputs of each matrix.
        rows: The number of rows of each table.
    """
    reasons = [] if widths or rows else ["the file has no int8 weights"]
    listed_widths, listed_rows = (", ".join(map(str, sorted(s))) for s in (widths, rows))
    if widths and all(width % BLOCK for width in widths):
        reasons.append(f"no int8 product has a multiple of {BLOCK} inputs, only {listed_widths}")
    elif widths:
        reasons.append("no int8 product consists of small numbers times a factor for each block")
    if rows and max(rows) < CODED_ROWS:
        reasons.append(f"no int8 table has at least {CODED_ROWS:,} rows, only {listed_rows}")
    elif rows:
        reasons.append(f"no int8 table of at least {CODED_ROWS:,} rows consists of codewords")
    return ", and ".join(reasons)


def _divide(blocks_GNO: Array) -> tuple[int, Array, Array] | None:
    """Divide blocks of integers by their factors.

    Returns:
        A key of `LEVELS`, the quotients plus half of its levels, and the factors; None if there are
        quotients that need more levels.
    """
    for count, levels in LEVELS.items():
        factors_G1O = block_factors(blocks_GNO, 1, levels // 2)
        digits_GNO = blocks_GNO.astype(np.int16) // factors_G1O + levels // 2
        if digits_GNO.min() >= 0 and digits_GNO.max() < levels:
            return count, digits_GNO, factors_G1O
    return None


def _codes(values_VH: Array, is_counted_V: Array) -> tuple[Array, Array, Array]:
    """Replace the triples of a table's rows by codes.

    Returns:
        The triples that are most frequent in the counted rows, [S, CODES, G]; the place of each
        row's triples among them, [V, S]; and how many triples of each row have none, [V].
    """
    rows, width = values_VH.shape
    begins = range(0, width, GROUP)
    books_SCG = np.zeros((len(begins), CODES, GROUP), np.uint8)
    codes_VS = np.zeros((rows, len(begins)), np.uint8)
    missing_V = np.zeros(rows, np.int32)
    for place, begin in enumerate(begins):
        shifts = 8 * np.arange(min(GROUP, width - begin), dtype=np.uint32)
        bytes_VG = values_VH[:, begin : begin + GROUP].astype(np.uint8)
        keys_V = (bytes_VG.astype(np.uint32) << shifts).sum(1, dtype=np.uint32)
        keys, counts = np.unique(keys_V[is_counted_V], return_counts=True)
        kept = np.sort(keys[np.argsort(-counts, kind="stable")[:CODES]])
        code_V = np.searchsorted(kept[:-1], keys_V)
        books_SCG[place, : len(kept), : len(shifts)] = kept[:, None] >> shifts & 255
        codes_VS[:, place] = code_V
        missing_V += kept[code_V] != keys_V
    return books_SCG.view(np.int8), codes_VS, missing_V
