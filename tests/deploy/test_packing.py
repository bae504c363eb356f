"""Packed weights are the integers of the int8 file, and give the same outputs."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_graphs import graph, node

from kdcli.deploy.calibrate import round_table
from kdcli.deploy.codebook import packed_grid
from kdcli.deploy.packing import pack
from kdcli.deploy.rounding import INT8_PAIRS, PACKED_16, PACKED_40, largest_pair, round_weight
from kdcli.errors import UsageError

WIDTH, OUTPUTS, ROWS = 96, 40, 4096


def int8_file(folder, matrix_IO, table_VI):
    """An int8 file with the product of integers and a matrix, and the gathered rows of a table."""
    made = graph(
        [node("MatMulInteger", "x matrix", "y"), node("Gather", "table ids", "rows")],
        {
            "x": (onnx.TensorProto.UINT8, ["N", len(matrix_IO)]),
            "ids": (onnx.TensorProto.INT64, ["V"]),
        },
        {
            "y": (onnx.TensorProto.INT32, ["N", matrix_IO.shape[1]]),
            "rows": (onnx.TensorProto.INT8, ["V", table_VI.shape[1]]),
        },
        {"matrix": matrix_IO, "table": table_VI},
    )
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


def products_of(rng, rows, levels=16):
    """Numbers of `levels` values times a factor for each block of 32, [rows, WIDTH]."""
    numbers = rng.integers(-levels // 2, levels // 2, (rows, WIDTH))
    most = 127 // (levels // 2)
    factors = rng.integers(1, most + 1, (rows, WIDTH // 32))
    factors *= rng.choice([-1, 1], factors.shape)
    return (numbers * np.repeat(factors, 32, 1)).astype(np.int8)


def coded(rng, width):
    """Rows whose triples are among 256 for each place, except for two rows, [ROWS, width]."""
    books = rng.integers(-127, 128, (-(-width // 3), 256, 3))
    triples = [book[rng.integers(0, 256, ROWS)] for book in books]
    table = np.concatenate(triples, 1)[:, :width].astype(np.int8)
    table[[3, 99]] = rng.integers(-127, 128, (2, width))
    return table


def outputs_of(file, width=WIDTH):
    feed = {
        "x": np.random.default_rng(1).integers(0, 256, (9, width)).astype(np.uint8),
        "ids": np.arange(ROWS),
    }
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, feed)


def unpacked_matrix(parts, name, levels):
    """The integers of a packed matrix, one number at a time."""
    words, factors = parts[f"{name}_words"].astype(int), parts[f"{name}_factors"]
    result = np.zeros(parts[f"{name}_shape"], np.int64)
    for n, (i, o) in enumerate(np.ndindex(*result.shape)):
        digit, place = divmod(n, len(words))
        number = words[place] // levels**digit % levels - levels // 2
        result[i, o] = number * int(factors[i // 32, 0, o])
    return result


def unpacked_table(parts, name, width):
    """The rows of a packed table, one code at a time."""
    codes, book = parts[f"{name}_codes"].astype(int), parts[f"{name}_codebook"]
    rows = [np.concatenate([book[256 * s + c] for s, c in enumerate(row)])[:width] for row in codes]
    table = np.array(rows)
    table[parts[f"{name}_exact_numbers"][:, 0]] = parts[f"{name}_exact"]
    return table


@pytest.mark.parametrize(("levels", "in_a_word"), [(16, 4), (40, 3)])
@pytest.mark.parametrize("width", [96, 97])
def test_unpacked_integers_and_outputs_are_those_of_the_int8_file(
    tmp_path, levels, in_a_word, width
):
    rng = np.random.default_rng(0)
    matrix_OI, table_VH = products_of(rng, OUTPUTS + 1, levels), coded(rng, width)
    matrix_OI[3], matrix_OI[4, :32] = 0, levels // 2
    file = int8_file(tmp_path, matrix_OI.T, table_VH)
    before = outputs_of(file)
    pack(file)
    model = onnx.load(file)
    onnx.checker.check_model(model)
    parts = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    assert (unpacked_matrix(parts, "matrix", levels) == matrix_OI.T).all()
    assert (unpacked_table(parts, "table", width) == table_VH).all()
    assert parts["table_exact_numbers"].ravel().tolist() == [3, 99]
    for one, other in zip(before, outputs_of(file), strict=True):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    assert parts["matrix_words"].nbytes == 2 * -(-matrix_OI.size // in_a_word)
    assert parts["matrix_factors"].nbytes == matrix_OI.size / 32
    assert parts["table_codes"].nbytes == ROWS * -(-width // 3)
    assert {node.domain for node in model.graph.node} == {""}


def test_integers_of_another_form_stay_and_others_are_packed(tmp_path):
    rng = np.random.default_rng(0)
    matrix_OI = products_of(rng, OUTPUTS)
    table_VH = rng.integers(-127, 128, (ROWS, WIDTH)).astype(np.int8)
    file = int8_file(tmp_path, matrix_OI.T, table_VH)
    before = outputs_of(file)
    pack(file)
    names = {each.name for each in onnx.load(file).graph.initializer}
    assert "table" in names
    assert "matrix" not in names
    assert all(map(np.array_equal, before, outputs_of(file)))


def test_a_table_of_few_rows_is_packed_if_texts_read_many_of_them(tmp_path):
    torch.manual_seed(0)
    rows, width = 5000, 30
    counts_V = torch.arange(rows) % 2 * torch.arange(rows)
    table_VH = round_table(torch.randn(rows, width), counts_V).values_OI.numpy()
    file = int8_file(tmp_path, np.full((40, 40), 127, np.int8), table_VH)
    pack(file)
    stored = onnx.load(file).graph.initializer
    parts = {each.name: onnx.numpy_helper.to_array(each) for each in stored}
    most_read = torch.arange(rows)[counts_V.argsort(descending=True)[: rows // 16]]
    assert parts["table_exact_numbers"].ravel().tolist() == sorted(most_read.tolist())
    assert (unpacked_table(parts, "table", width) == table_VH).all()


def test_what_cannot_be_packed_is_one_message(tmp_path):
    odd = np.full((40, 40), 127, np.int8)
    with pytest.raises(UsageError, match="multiple of 32 inputs, only 40"):
        pack(int8_file(tmp_path, odd, odd))
    floats = np.ones((64, 64), np.float32)
    with pytest.raises(UsageError, match="no int8 weights"):
        pack(int8_file(tmp_path, floats, floats))
    with pytest.raises(UsageError, match=r"no int8 table has at least 4,096 rows, only 40"):
        pack(int8_file(tmp_path, floats, odd))
    other = np.random.default_rng(0).integers(-127, 128, (ROWS, WIDTH)).astype(np.int8)
    with pytest.raises(UsageError, match=r"no int8 table of at least 4,096 rows consists of code"):
        pack(int8_file(tmp_path, floats, other))


@pytest.mark.parametrize("grid", [PACKED_16, PACKED_40])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_rounded_weights_are_products_of_a_factor_and_a_small_number(grid, outlier):
    torch.manual_seed(0)
    weight_OI = torch.randn(OUTPUTS, WIDTH)
    weight_OI[2, 5] *= outlier
    values_OI = round_weight(weight_OI, grid).values_OI
    blocks = values_OI.numpy().reshape(OUTPUTS, -1, 32).astype(int)
    factors = np.gcd.reduce(blocks, axis=-1, keepdims=True).clip(1)
    numbers = blocks // factors
    turned = np.where(numbers.max(-1, keepdims=True) == -grid.low, -numbers, numbers)
    assert grid.low <= turned.min() < turned.max() <= grid.high
    assert np.abs(blocks).max() <= 127
    assert largest_pair(values_OI) <= grid.pair_limit


def test_a_width_without_whole_blocks_has_8_bits():
    torch.manual_seed(0)
    weight_OI = torch.randn(OUTPUTS, 40)
    rounded, plain = (round_weight(weight_OI, grid) for grid in (PACKED_16, INT8_PAIRS))
    assert torch.equal(rounded.values_OI, plain.values_OI)
    assert torch.equal(rounded.scale_OG, plain.scale_OG)


@pytest.mark.parametrize(
    ("matrices", "tables", "grid"),
    [
        (10_600_000, [(30_522, 384), (512, 384)], PACKED_40),
        (3_540_000, [(9_000, 384)], PACKED_16),
        (100_000, [(4_000, 384)], PACKED_16),
    ],
)
def test_large_tables_make_room_for_finer_numbers(matrices, tables, grid):
    assert packed_grid(matrices, tables) is grid
