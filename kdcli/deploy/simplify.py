"""Simplify a graph that torch recorded. The outputs stay the same."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kdcli.deploy.sessions import library

if TYPE_CHECKING:
    import onnx_ir
    from onnx_ir import Value
    from onnxscript.rewriter import MatchContext

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
