"""The error of each product, and the fewest that must stay in float32."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kdcli.deploy.quantise import (
    _rounded_weight,
    key_of,
    product_errors,
    products,
    quantise_onnx,
    quantise_openvino,
    smallest_count,
)
from kdcli.deploy.sessions import onnx_caller, openvino_caller


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
    most = {"onnx": 64, "openvino": 127}[engine]
    scale = np.abs(weight).max(1, keepdims=True) / most
    rounded = np.round(weight / scale) * scale
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
        model, lambda batch: model(batch["x"]).numpy().ravel(), [{"x": x}], engine, "int8"
    )
    assert list(errors) == ["outlier", "even", "unused"]
    with torch.no_grad():
        exact = model(x).numpy()
        weight, bias = model.even.weight.numpy(), model.even.bias.numpy()
        changed = exact - model.even(x).numpy() + reference(weight, x.numpy(), engine) + bias
    assert errors["even"] == pytest.approx(
        np.linalg.norm(changed - exact) / np.linalg.norm(exact), rel=1e-9
    )
    assert errors["unused"] == 0
    with torch.no_grad():
        assert (model(x).numpy() == exact).all()


class Words(nn.Module):
    """Rows of a table, times a matrix."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.matrix = nn.Embedding(50, 64), nn.Linear(64, 48, bias=False)
        with torch.no_grad():
            self.table.weight[7, 3] = 30.0  # 30 standard deviations

    def forward(self, ids):
        return self.matrix(self.table(ids))


def graph_of(model, folder):
    """The graph of both parts of `Words`, whose matrix multiplies another input."""
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    table, matrix = (part.weight.detach().numpy() for part in (model.table, model.matrix))
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"], name="look_up"),
            helper.make_node("MatMul", ["x", "matrix"], ["y"], name="multiply"),
        ],
        "words",
        [
            helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["V"]),
            helper.make_tensor_value_info("x", floats, ["N", 64]),
        ],
        [
            helper.make_tensor_value_info("rows", floats, ["V", 64]),
            helper.make_tensor_value_info("y", floats, ["N", 48]),
        ],
        [
            onnx.numpy_helper.from_array(table, "table"),
            onnx.numpy_helper.from_array(np.ascontiguousarray(matrix.T), "matrix"),
        ],
    )
    file = folder / "plain.onnx"
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), file)
    return file


def by_file(model, folder, engine, precision, in_float=frozenset()):
    """The table and the matrix [48, 64] that a runtime computes with, and its file."""
    plain = graph_of(model, folder)
    file = folder / "low.onnx"
    # The activations are whole numbers, so only the weights are rounded.
    fed = {"ids": np.arange(50), "x": np.eye(64, dtype=np.float32)}
    if engine == "onnx":
        quantise_onnx(plain, file, precision, in_float)
        call = onnx_caller(file, threads=1)
    else:
        import openvino

        graph = openvino.Core().read_model(plain)
        quantise_openvino(graph, in_float)
        file = file.with_suffix(".xml")
        openvino.save_model(graph, file, compress_to_fp16=False)
        call = openvino_caller(file, threads=1)
    rows, y = call({name: fed[name] for name in call.names})
    return np.array(rows), np.array(y).T, file


@pytest.mark.parametrize(
    ("engine", "precision"), [("onnx", "int8"), ("onnx", "q4"), ("openvino", "int8")]
)
def test_weights_are_rounded_as_the_file_rounds_them(engine, precision, tmp_path):
    model = Words()
    table, matrix, _ = by_file(model, tmp_path, engine, precision)
    for module, found in ((model.table, table), (model.matrix, matrix)):
        expected = _rounded_weight(module, engine, precision).numpy()
        assert np.abs(expected - module.weight.detach().numpy()).max() > 1e-4
        assert found == pytest.approx(expected, abs=1e-5)


def test_each_row_of_a_table_has_its_own_scale_in_int8(tmp_path):
    model = Words()
    exact_VH = model.table.weight.detach().double().numpy()
    table_VH, _, file = by_file(model, tmp_path, "onnx", "int8")
    # Half a step of the row's own scale; with a single scale, it would be 0.12 in each row.
    steps_V1 = np.abs(exact_VH).max(axis=1, keepdims=True) / 127
    assert (np.abs(table_VH - exact_VH) <= 0.501 * steps_V1).all()
    assert np.abs(np.delete(table_VH - exact_VH, 7, axis=0)).max() < 0.02
    stored = {tensor.name: tensor for tensor in onnx.load(file).graph.initializer}
    assert "table" not in stored
    assert stored["table_int8"].data_type == onnx.TensorProto.INT8
    assert not (tmp_path / "by_row_plain.onnx").exists()


def test_weights_of_products_have_seven_bits(tmp_path):
    """With eight, sums of products overflow on processors without VNNI."""
    _, _, file = by_file(Words(), tmp_path, "onnx", "int8")
    (weight,) = (
        onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(file).graph.initializer
        if tensor.name.startswith("matrix") and tensor.data_type == onnx.TensorProto.INT8
        if len(tensor.dims) == 2
    )
    assert np.abs(weight.astype(int)).max() == 64


@pytest.mark.parametrize(
    ("engine", "precision"), [("onnx", "int8"), ("onnx", "q4"), ("openvino", "int8")]
)
def test_a_table_can_stay_in_float(engine, precision, tmp_path):
    model = Words()
    exact = model.table.weight.detach().numpy()
    table, matrix, _ = by_file(model, tmp_path, engine, precision, frozenset({key_of(exact)}))
    assert (table == exact).all()
    assert np.abs(matrix - model.matrix.weight.detach().numpy()).max() > 1e-4


def test_the_error_of_a_table_is_that_of_its_rounded_rows():
    model = Words().double().eval()
    assert list(products(model)) == ["table", "matrix"]
    ids, before = torch.arange(50), model.table.weight.detach().clone()
    outputs = lambda batch: model(batch["ids"]).numpy().ravel()  # noqa: E731
    errors = product_errors(model, outputs, [{"ids": ids}], "onnx", "int8")
    table, matrix = (part.weight.detach().numpy() for part in (model.table, model.matrix))
    steps = np.abs(table).max(1, keepdims=True) / 127
    change = (np.round(table / steps) * steps - table) @ matrix.T
    expected = np.linalg.norm(change) / np.linalg.norm(table @ matrix.T)
    assert errors["table"] == pytest.approx(expected, rel=1e-9)
    assert torch.equal(model.table.weight, before)
