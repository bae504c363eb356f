"""The error of each product, and the fewest that must stay in float32."""

from types import MappingProxyType

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx_graphs import graph, node
from torch import nn

from kdcli.deploy.backends import PACKED
from kdcli.deploy.calibrate import (
    KERNELS,
    SMALL_TABLE,
    Rounding,
    by_key,
    kernel_for,
    key_of,
    nearest_rounding,
    product_errors,
    products,
    smallest_count,
)
from kdcli.deploy.packing import pack
from kdcli.deploy.quantise import quantise_onnx, quantise_openvino
from kdcli.deploy.rounding import INT4_BLOCKS, INT8, INT8_PAIRS, PACKED_16, round_weight
from kdcli.deploy.sessions import onnx_caller, openvino_caller

pytestmark = pytest.mark.slow


@given(st.integers(0, 200), st.integers(0, 300))
def test_the_fewest_that_hold_are_found_in_few_attempts(most, needed):
    tried = []

    def holds(count):
        tried.append(count)
        return count >= needed

    assert smallest_count(most, holds) == (needed if needed <= most else None)
    assert len(tried) == len(set(tried)) <= 2 * (most.bit_length() + 1)


class Two(nn.Module):
    """A product whose inputs have an outlier, before one whose inputs have none; and one that is
    not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.outlier, self.even, self.unused = (
            nn.Linear(256, 256, dtype=torch.float64) for _ in range(3)
        )

    def forward(self, x):
        spread = x.clone()
        spread[..., 0] *= 1000
        return self.outlier(spread) + self.even(x)


def reference(weight, x, engine):
    """A product in float64 with rounded weights and inputs, written for one engine without groups
    of activations."""
    steps = np.abs(weight).max(1, keepdims=True) / 127
    if engine == "onnx":
        # Two neighbours of the same sign are at most 128 steps.
        pairs = weight.reshape(len(weight), -1, 2)
        sums = [np.abs(np.clip(pairs, *of)).sum(-1).max(1) for of in ((0, None), (None, 0))]
        steps = np.maximum(steps, np.maximum(*sums)[:, None] / 128)
    scale = steps.astype(np.float32).astype(np.float64)
    rounded = np.round(weight / steps)
    if engine == "onnx":
        first = rounded[:, ::2]
        lowest, highest = -128 - np.minimum(first, 0), 128 - np.maximum(first, 0)
        rounded[:, 1::2] = np.clip(rounded[:, 1::2], lowest, highest)
    rounded = rounded * scale
    if engine == "onnx":
        low, high = min(0, x.min()), max(0, x.max())
        step = (high - low) / 255
        zero = np.round(-low / step)
        return (np.clip(np.round(x / step) + zero, 0, 255) - zero) * step @ rounded.T
    step = np.abs(x.reshape(len(x), -1, 128)).max(-1).repeat(128, -1) / 127
    return np.round(x / step) * step @ rounded.T


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_errors_are_those_of_each_product_alone(engine):
    model, x = Two().eval(), torch.randn(6, 256, dtype=torch.float64)
    errors = product_errors(
        model,
        lambda batch: model(batch["x"]).numpy().ravel(),
        [{"x": x}],
        KERNELS[engine, "int8"],
        {},
    )
    assert list(errors) == ["outlier", "even", "unused"]
    with torch.no_grad():
        exact = model(x).numpy()
        weight, bias = model.even.weight.numpy(), model.even.bias.numpy()
        changed = exact - model.even(x).numpy() + reference(weight, x.numpy(), engine) + bias
    assert errors["even"] == pytest.approx(
        np.linalg.norm(changed - exact) / np.linalg.norm(exact), rel=1e-6
    )
    assert errors["unused"] == 0
    with torch.no_grad():
        assert (model(x).numpy() == exact).all()


class Words(nn.Module):
    """Rows of a table, times a matrix."""

    def __init__(self, rows=50):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.matrix = nn.Embedding(rows, 64), nn.Linear(64, 48, bias=False)
        with torch.no_grad():
            self.table.weight[7, 3] = 30.0  # 30 standard deviations

    def forward(self, ids):
        return self.matrix(self.table(ids))


def graph_of(model, folder):
    """The graph of both parts of `Words`, whose matrix multiplies another input."""
    table, matrix = (part.weight.detach().numpy() for part in (model.table, model.matrix))
    made = graph(
        [node("Gather", "table ids", "rows"), node("MatMul", "x matrix", "y")],
        {"ids": (onnx.TensorProto.INT64, ["V"]), "x": ["N", 64]},
        {"rows": ["V", 64], "y": ["N", 48]},
        {"table": table, "matrix": matrix.T},
    )
    file = folder / "plain.onnx"
    onnx.save(made, file)
    return file


def by_file(model, folder, engine, precision, in_float=frozenset(), roundings=MappingProxyType({})):
    """The table and the matrix [48, 64] that a runtime computes with, and its file."""
    plain = graph_of(model, folder)
    file = folder / "low.onnx"
    # The activations are whole numbers, so only the weights are rounded.
    fed = {"ids": np.arange(len(model.table.weight)), "x": np.eye(64, dtype=np.float32)}
    if engine == "onnx":
        quantise_onnx(plain, file, precision, in_float, roundings)
        if precision == PACKED:
            pack(file)
        call = onnx_caller(file, threads=1)
    else:
        import openvino

        read = openvino.Core().read_model(plain)
        quantise_openvino(read, in_float, roundings)
        file = file.with_suffix(".xml")
        openvino.save_model(read, file, compress_to_fp16=False)
        call = openvino_caller(file, threads=1)
    rows, y = call({name: fed[name] for name in call.names})
    return np.array(rows), np.array(y).T, file


@pytest.mark.parametrize(
    ("engine", "precision", "rows"),
    [
        ("onnx", "int8", 50),
        ("onnx", PACKED, 50),
        ("onnx", PACKED, 4200),
        ("onnx", "q4", 50),
        ("openvino", "int8", 50),
    ],
)
def test_weights_are_rounded_as_the_file_rounds_them(engine, precision, rows, tmp_path):
    model = Words(rows)
    table, matrix, _ = by_file(model, tmp_path, engine, precision)
    for module, found in ((model.table, table), (model.matrix, matrix)):
        expected = nearest_rounding(module, kernel_for(engine, precision, model))
        expected = expected.integers.weight().numpy()
        assert np.abs(expected - module.weight.detach().numpy()).max() > 1e-4
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("engine", "precision", "grid"),
    [
        ("onnx", "int8", INT8_PAIRS),
        ("onnx", PACKED, PACKED_16),
        ("onnx", "q4", INT4_BLOCKS),
        ("openvino", "int8", INT8),
    ],
)
def test_a_file_has_the_integers_it_is_given(engine, precision, grid, tmp_path):
    model = Words()
    smoothing = torch.linspace(0.5, 2, 64) if grid is INT8_PAIRS else None
    factor = 1 if smoothing is None else smoothing
    # Not the nearest integers, so that they can be told from those of the engine.
    integers = round_weight(model.matrix.weight * factor + 0.01, grid)
    roundings = by_key(model, {"matrix": Rounding(integers, smoothing)})
    _, matrix, _ = by_file(model, tmp_path, engine, precision, roundings=roundings)
    if smoothing is None:
        assert matrix == pytest.approx(integers.weight().numpy(), abs=1e-5)
        return
    # The rows of the identity, divided by the smoothing, are rounded to a common scale.
    steps = smoothing.reciprocal() / (2.0 / 255)
    expected = integers.weight() * (torch.round(steps) * (2.0 / 255))
    assert matrix == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [("onnx", "int8"), ("onnx", PACKED), ("onnx", "q4"), ("openvino", "int8")],
)
def test_a_table_can_stay_in_float(engine, precision, tmp_path):
    model = Words()
    exact = model.table.weight.detach().numpy()
    table, matrix, _ = by_file(model, tmp_path, engine, precision, frozenset({key_of(exact)}))
    assert (table == exact).all()
    assert np.abs(matrix - model.matrix.weight.detach().numpy()).max() > 1e-4


@pytest.mark.parametrize(
    ("engine", "precision"),
    [("onnx", "int8"), ("onnx", PACKED), ("onnx", "q4"), ("openvino", "int8")],
)
def test_a_table_with_few_rows_stays_in_float(engine, precision, tmp_path):
    for rows in (SMALL_TABLE, SMALL_TABLE + 1):
        model = Words(rows)
        table, _, _ = by_file(model, tmp_path, engine, precision)
        is_exact = (table == model.table.weight.detach().numpy()).all()
        assert is_exact == ("table" not in products(model)) == (rows == SMALL_TABLE)


def test_the_error_of_a_table_is_that_of_its_rounded_rows():
    model = Words().double().eval()
    assert list(products(model)) == ["table", "matrix"]
    ids, before = torch.arange(50), model.table.weight.detach().clone()
    outputs = lambda batch: model(batch["ids"]).numpy().ravel()  # noqa: E731
    errors = product_errors(model, outputs, [{"ids": ids}], KERNELS["onnx", "int8"], {})
    table, matrix = (part.weight.detach().numpy() for part in (model.table, model.matrix))
    steps = np.abs(table).max(1, keepdims=True) / 127
    change = (np.round(table / steps) * steps - table) @ matrix.T
    expected = np.linalg.norm(change) / np.linalg.norm(table @ matrix.T)
    # The scales of a file are in float32.
    assert errors["table"] == pytest.approx(expected, rel=1e-5)
    assert torch.equal(model.table.weight, before)
