"""The nodes that a recorded graph loses, and those that it must keep."""

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import TensorProto
from onnx_graphs import graph, node

from kdcli.deploy.export import simplify
from kdcli.deploy.quantise import quantise_onnx

INFINITE, LOWEST = -np.inf, float(np.finfo(np.float32).min)
"""What a mask may add to the scores that it hides."""


def ops_of(of):
    return [one.op_type for one in of.node]


def masked_softmax(*hidden):
    """A guarded softmax of scores to which masks are added, each with its own number."""
    # Operators that compute -inf.
    fill = onnx.numpy_helper.from_array(np.array([INFINITE], np.float32))
    nodes = [
        node("MatMul", "q k", "product"),
        node("ConstantOfShape", "scalar", "filled", value=fill),
        node("Log", "zero", "logarithm"),
    ]
    inputs, scores = {name: [4, 4] for name in "qk"}, "product"
    arrays = {"zero": np.array(0, np.float32), "scalar": np.array([], np.int64)}
    for number, value in enumerate(hidden):
        seen, mask, total = (f"{name}_{number}" for name in ("seen", "mask", "total"))
        inputs[seen] = (TensorProto.BOOL, [4, 4])
        name = value if isinstance(value, str) else f"hidden_{number}"
        if name not in ("filled", "logarithm"):
            arrays[name] = np.array(LOWEST if name == "shared" else value, np.float32)
        nodes += [
            node("Where", f"{seen} zero {name}", mask),
            node("Add", f"{scores} {mask}", total),
        ]
        scores = total
    nodes += [
        node("Softmax", scores, "shares", axis=-1),
        node("IsNaN", "shares", "wrong"),
        node("Where", "wrong zero shares", "y"),
    ]
    return graph(nodes, inputs, {"y": [4, 4]}, arrays, opset=20)


def simplified(model):
    ir = onnx_ir.from_proto(model)
    simplify(ir)
    return onnx_ir.to_proto(ir)


def outputs_of(model, **inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, inputs)[0]


@pytest.mark.parametrize(
    ("hidden", "is_guarded"),
    [
        ([], False),
        ([LOWEST], False),
        ([-1e4, LOWEST], False),
        ([INFINITE], True),
        ([LOWEST, LOWEST], True),
        (["shared", "shared"], True),
        (["filled"], True),
        (["logarithm"], True),
    ],
)
def test_a_softmax_is_guarded_where_all_its_scores_may_be_infinite(hidden, is_guarded):
    model = masked_softmax(*hidden)
    shorter = simplified(model)
    assert ("IsNaN" in ops_of(shorter.graph)) == is_guarded
    draw = np.random.default_rng(0)
    inputs = {name: draw.normal(size=(4, 4)).astype(np.float32) for name in "qk"}
    seen = np.tri(4, dtype=bool)
    seen[0] = False
    inputs |= {f"seen_{number}": seen for number in range(len(hidden))}
    found = outputs_of(shorter, **inputs)
    assert np.array_equal(found, outputs_of(model, **inputs))
    assert np.isfinite(found).all()


def swapped(last):
    """Keys whose last two axes are swapped as torch records it. `last` is a slice's beginning."""
    bounds = {"first": np.iinfo(np.int64).min, "second_last": -2, "last": last}
    bounds |= {"end": np.iinfo(np.int64).max, "rest": -1}
    arrays = {name: np.array([value], np.int64) for name, value in bounds.items()}
    nodes = [
        node("Shape", "keys", "shape", start=0),
        node("Slice", "shape last end", "width"),
        node("Slice", "shape second_last last", "length"),
        node("Slice", "shape first second_last", "outer"),
        node("Concat", "rest length width", "heads_shape", axis=0),
        node("Reshape", "keys heads_shape", "heads"),
        node("Transpose", "heads", "turned", perm=[0, 2, 1]),
        node("Concat", "outer width length", "y_shape", axis=0),
        node("Reshape", "turned y_shape", "y"),
    ]
    return graph(nodes, {"keys": ["rows", 3, "length", 8]}, {"y": None}, arrays, opset=20)


def test_keys_are_swapped_by_a_single_transposition():
    shorter = simplified(swapped(last=-1))
    assert ops_of(shorter.graph) == ["Transpose"]
    keys = np.random.default_rng(0).normal(size=(2, 3, 5, 8)).astype(np.float32)
    found = outputs_of(shorter, keys=keys)
    assert np.array_equal(found, outputs_of(swapped(last=-1), keys=keys))
    assert np.array_equal(found, keys.swapaxes(2, 3))


def test_other_shapes_are_kept():
    model = swapped(last=3)  # means the same for four axes, but is not what torch records
    assert len(simplified(model).graph.node) == len(model.graph.node)


def fused_ops(file, tmp_path):
    """Return the operators that ONNX Runtime runs for a file."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return ops_of(onnx.load(tmp_path / "fused.onnx").graph)


def test_no_normalisation_is_fused_with_the_sum_before_it_in_int8(tmp_path):
    draw = np.random.default_rng(0)
    arrays = {"weight": draw.normal(size=(32, 32)), "bias": np.zeros(32), "scale": np.ones(32)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    nodes = [
        node("MatMul", "x weight", "product"),
        node("Add", "product bias", "linear"),
        node("Add", "linear x", "residual"),
        node("LayerNormalization", "residual scale bias", "y"),
    ]
    shape = ["rows", "length", 32]
    model = graph(nodes, {"x": shape}, {"y": shape}, arrays, opset=20)
    onnx.save(model, tmp_path / "plain.onnx")
    # If ONNX Runtime no longer fuses them, kdcli need not prevent it.
    assert "SkipLayerNormalization" in fused_ops(tmp_path / "plain.onnx", tmp_path)
    quantise_onnx(tmp_path / "plain.onnx", tmp_path / "low.onnx", "int8")
    ops = fused_ops(tmp_path / "low.onnx", tmp_path)
    assert "SkipLayerNormalization" not in ops
    assert "LayerNormalization" in ops
    # The bias is still added by the product.
    assert "Add" not in ops
    values = draw.normal(size=(2, 5, 32)).astype(np.float32)
    found = outputs_of(onnx.load(tmp_path / "low.onnx"), x=values)
    assert np.abs(found - outputs_of(model, x=values)).max() < 0.05
