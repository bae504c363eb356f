"""Folding the division of a product's input into the weights that compute the input."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_graphs import graph, node

from kdcli.deploy.calibrate import Rounding, key_of
from kdcli.deploy.quantise import quantise_onnx
from kdcli.deploy.rounding import INT8_PAIRS, round_weight

HEADS, WIDTH, OUTPUTS = 4, 32, 24


def graph_of(weights, folder, kind):
    """Write a graph whose last product reads the output of attention or of a layer normalisation.

    Args:
        weights: Arrays by name; matrices are [in, out].
        folder: Where to write the graph.
        kind: `attention`, `norm`, or `shared`, where attention's result is also an output.
    """
    before = [
        node("MatMul", "x values", "v"),
        node("Add", "bias v", "v_biased"),
        node("Reshape", "v_biased split", "v_split"),
        node("Transpose", "v_split", "v_heads", perm=[0, 2, 1, 3]),
        node("MatMul", "probabilities v_heads", "sums"),
        node("Transpose", "sums", "sums_last", perm=[0, 2, 1, 3]),
        node("Reshape", "sums_last join", "y"),
    ]
    if kind == "norm":
        before = [node("LayerNormalization", "x scale bias", "y")]
    nodes = [*before, node("MatMul", "y matrix", "z")]
    inputs = {"x": ["B", "L", WIDTH], "probabilities": ["B", HEADS, "L", "L"]}
    outputs = {"z": ["B", "L", OUTPUTS]} | ({"y": ["B", "L", WIDTH]} if kind == "shared" else {})
    onnx.save(graph(nodes, inputs, outputs, weights), folder / "plain.onnx")
    return folder / "plain.onnx"


def result_in_float64(weights, kind, x_BLI, probabilities_BALL, smoothing_I, rounded):
    """Compute the last product with rounded weights. Its input is rounded after the division."""
    if kind == "norm":
        centred = x_BLI - x_BLI.mean(-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        y = y * weights["scale"] + weights["bias"]
    else:
        integers, scale = rounded["values"]
        low, high = min(0, x_BLI.min()), max(0, x_BLI.max())
        step = (high - low) / 255
        zero = np.round(-low / step)
        x_BLI = (np.clip(np.round(x_BLI / step) + zero, 0, 255) - zero) * step
        v = x_BLI @ (integers * scale).T + weights["bias"]
        heads = v.reshape(*v.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)
        y = (probabilities_BALL @ heads).transpose(0, 2, 1, 3).reshape(v.shape)
    y = y / smoothing_I
    low, high = min(0, y.min()), max(0, y.max())
    step = (high - low) / 255
    zero = np.round(-low / step)
    integers, scale = rounded["matrix"]
    return (np.clip(np.round(y / step) + zero, 0, 255) - zero) * step @ (integers * scale).T


@pytest.mark.parametrize(("kind", "divisions"), [("attention", 0), ("norm", 0), ("shared", 1)])
def test_a_division_needs_a_node_only_if_the_weights_before_it_cannot_do_it(
    kind, divisions, tmp_path
):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, 7, WIDTH)).astype(np.float32)
    scores = np.exp(draw.normal(size=(2, HEADS, 7, 7)))
    probabilities = (scores / scores.sum(-1, keepdims=True)).astype(np.float32)
    weights = {
        "values": draw.normal(size=(WIDTH, WIDTH)),
        "scale": draw.uniform(0.5, 1.5, WIDTH),
        "bias": draw.normal(size=WIDTH),
        "matrix": draw.normal(size=(WIDTH, OUTPUTS)),
    }
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    shapes = {"split": [2, 7, HEADS, -1], "join": [2, 7, -1]}
    constants = weights | {name: np.array(shape) for name, shape in shapes.items()}
    plain = graph_of(constants, tmp_path, kind)
    smoothing_I = torch.from_numpy(draw.uniform(0.2, 5, WIDTH).astype(np.float32))
    roundings = {
        name: Rounding(
            round_weight(torch.from_numpy(weights[name].T) * factor, INT8_PAIRS), divisor
        )
        for name, factor, divisor in (("values", 1, None), ("matrix", smoothing_I, smoothing_I))
    }
    by_key = {key_of(weights[name].T): rounding for name, rounding in roundings.items()}
    quantise_onnx(plain, tmp_path / "low.onnx", "int8", roundings=by_key)
    nodes = onnx.load(tmp_path / "low.onnx").graph.node
    assert sum("smoothed" in one.name for one in nodes if one.op_type == "Mul") == divisions
    session = onnxruntime.InferenceSession(tmp_path / "low.onnx")
    found = session.run(["z"], {"x": x, "probabilities": probabilities})[0]
    rounded = {
        name: (each.integers.values_OI.double().numpy(), each.integers.scale_OG.double().numpy())
        for name, each in roundings.items()
    }
    expected = result_in_float64(
        weights, kind, x.astype(np.float64), probabilities, smoothing_I.double().numpy(), rounded
    )
    # A value close to halfway between two integers may round either way.
    assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)
