"""Simplify a graph that torch recorded. The outputs stay the same."""

from typing import TYPE_CHECKING, Any

import numpy as np

from kdcli.deploy.sessions import library

if TYPE_CHECKING:
    import onnx_ir
    from onnx_ir import Value
    from onnxscript.rewriter import MatchContext

HUGE = 1e30
"""The sum of two masks with larger numbers may be infinite."""
PRODUCTS = ("MatMul", "Gemm", "Einsum")
FIRST, END = np.iinfo(np.int64).min, np.iinfo(np.int64).max
"""The bounds of a slice that begins or ends with its axis."""


def simplify(model: "onnx_ir.Model") -> None:
    """Remove nodes that attention does not need, in place.

    * torch replaces the softmax of a row by zeros if it is not a number, because a row of -inf
      would be. Where masks are finite, no row is.
    * torch swaps the last two axes of the keys by three nodes and by the computation of two shapes.
      ONNX Runtime fuses a single `Transpose` with the product that reads it.
    """
    rewriter = library("onnxscript.rewriter", "onnx")
    # Each rule has the nodes to look for, those that replace them, and a condition.
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
    """Return whether the scores are finite: their masks are, and at most one mask is huge."""
    constant_of = library("onnx_ir.convenience", "onnx").get_const_tensor
    waiting, seen, huge = [scores], set(), 0
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if (constant := constant_of(value)) is not None:
            values = constant.numpy()
            if np.isinf(values).any():
                return False
            huge += int((np.abs(values) > HUGE).sum())
        elif (node := value.producer()) is not None and node.op_type not in PRODUCTS:
            waiting += [each for each in node.inputs if each is not None]
    return huge <= 1


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
