"""Packed weights are the integers of the int8 file, and give the same outputs."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_graphs import graph, node

from kdcli.deploy.packing import pack
from kdcli.deploy.rounding import (
    INT4_FACTORS,
    INT4_FACTORS_PAIRS,
    INT8_PAIRS,
    largest_pair,
    round_weight,
)
from kdcli.errors import MachineError, UsageError

WIDTH, OUTPUTS, ROWS = 96, 40, 50


def int8_file(folder, matrix_IO, table_VI, opset=20):
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
    made.opset_import[0].version = opset
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


def products_of(rng, rows):
    """4-bit numbers times a factor for each block of 32, [rows, WIDTH]."""
    numbers = rng.integers(-8, 8, (rows, WIDTH))
    factors = rng.integers(1, 16, (rows, WIDTH // 32)) * rng.choice([-1, 1], (rows, WIDTH // 32))
    return (numbers * np.repeat(factors, 32, 1)).astype(np.int8)


def outputs_of(file, width=WIDTH):
    feed = {
        "x": np.random.default_rng(1).integers(0, 256, (9, width)).astype(np.uint8),
        "ids": np.arange(ROWS),
    }
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, feed)


def unpacked(parts, name, axis):
    """The integers of a packed matrix, from its parts and one number at a time."""
    numbers, factors = parts[f"{name}_numbers"], parts[f"{name}_factors"]
    shape = parts[f"{name}_shape"]
    result = np.zeros(shape, np.float64)
    for place in np.ndindex(*shape):
        block, offset = divmod(place[axis], 32)
        byte_place = [*place[:axis], block, offset % 16, *place[axis + 1 :]]
        factor_place = [*place[:axis], block, 0, *place[axis + 1 :]]
        byte = int(numbers[tuple(byte_place)])
        number = (byte >> 4 if offset >= 16 else byte & 15) - 8
        result[place] = number * float(factors[tuple(factor_place)])
    return result


def test_unpacked_integers_and_outputs_are_those_of_the_int8_file(tmp_path):
    rng = np.random.default_rng(0)
    matrix_OI, table_VI = products_of(rng, OUTPUTS), products_of(rng, ROWS)
    matrix_OI[3], matrix_OI[4, :32], table_VI[5] = 0, 8, 120
    file = int8_file(tmp_path, matrix_OI.T, table_VI)
    before = outputs_of(file)
    pack(file)
    model = onnx.load(file)
    onnx.checker.check_model(model)
    parts = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    assert (unpacked(parts, "matrix", 0) == matrix_OI.T).all()
    assert (unpacked(parts, "table", 1) == table_VI).all()
    for one, other in zip(before, outputs_of(file), strict=True):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    saved = (
        matrix_OI.size
        + table_VI.size
        - sum(
            parts[f"{name}_{part}"].nbytes
            for name in ("matrix", "table")
            for part in ("numbers", "factors")
        )
    )
    assert saved == (0.5 - 1 / 32) * (matrix_OI.size + table_VI.size)
    assert {node.domain for node in model.graph.node} == {""}


def test_integers_without_a_factor_stay_and_others_are_packed(tmp_path):
    rng = np.random.default_rng(0)
    matrix_OI, table_VI = products_of(rng, OUTPUTS), products_of(rng, ROWS)
    table_VI[7, :2] = 127, 1
    file = int8_file(tmp_path, matrix_OI.T, table_VI)
    before = outputs_of(file)
    pack(file)
    names = {each.name for each in onnx.load(file).graph.initializer}
    assert "table" in names
    assert "matrix" not in names
    assert all(map(np.array_equal, before, outputs_of(file)))


def test_what_cannot_be_packed_is_one_message(tmp_path):
    odd = np.full((40, 40), 127, np.int8)
    with pytest.raises(UsageError, match="multiple of 32 inputs, only 40"):
        pack(int8_file(tmp_path, odd, odd))
    floats = np.ones((64, 64), np.float32)
    with pytest.raises(UsageError, match="no int8 weights"):
        pack(int8_file(tmp_path, floats, floats))
    with pytest.raises(MachineError, match="opset 17, and packed weights need at least 18"):
        pack(int8_file(tmp_path, odd, odd, opset=17))


@pytest.mark.parametrize("grid", [INT4_FACTORS, INT4_FACTORS_PAIRS])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_rounded_weights_are_products_of_a_factor_and_4_bits(grid, outlier):
    torch.manual_seed(0)
    weight_OI = torch.randn(OUTPUTS, WIDTH)
    weight_OI[2, 5] *= outlier
    values_OI = round_weight(weight_OI, grid).values_OI
    blocks = values_OI.numpy().reshape(OUTPUTS, -1, 32).astype(int)
    factors = np.gcd.reduce(blocks, axis=-1, keepdims=True).clip(1)
    numbers = blocks // factors
    turned = np.where(numbers.max(-1, keepdims=True) == 8, -numbers, numbers)
    assert (turned.min(), turned.max()) == (-8, 7)
    assert np.abs(blocks).max() <= 127
    if grid.pair_limit is not None:
        assert largest_pair(values_OI) <= grid.pair_limit


def test_a_width_without_whole_blocks_has_8_bits():
    torch.manual_seed(0)
    weight_OI = torch.randn(OUTPUTS, 40)
    rounded, plain = (round_weight(weight_OI, grid) for grid in (INT4_FACTORS_PAIRS, INT8_PAIRS))
    assert torch.equal(rounded.values_OI, plain.values_OI)
    assert torch.equal(rounded.scale_OG, plain.scale_OG)
