"""Find q, k and v where a network computes its attention, whatever code does it.

Own code calls `scaled_dot_product_attention` itself, or writes the softmax out. While a layer runs,
`AttentionProducts` sees torch's functions. It follows a product of two tensors through the scale,
the mask and other functions that keep its shape, up to a softmax, and from there to v. Nothing is
patched: torch removes the mode when its context ends, and other threads never have it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from kdcli.attention import AttentionCall

MULTIPLY = ("mul", "mul_", "multiply", "multiply_")
DIVIDE = ("div", "div_", "divide", "divide_", "true_divide", "true_divide_")


@dataclass(frozen=True)
class Scores:
    """q and k as they enter their product, and what multiplies the product before the softmax."""

    q: Tensor
    k: Tensor
    scale: Tensor | float


@dataclass(frozen=True)
class Product:
    """A product of two tensors, as [..., L, M] @ [..., M, N].

    Attributes:
        left: The left side.
        right: The right side.
        scale: What multiplies the product.
        order: The dimensions of the function's output, in the order of the product's.
    """

    left: Tensor
    right: Tensor
    scale: float = 1.0
    order: tuple[int, ...] | None = None

    def of(self, output: Tensor) -> Tensor:
        """Return the product [..., L, N] from the function's output."""
        return output if self.order is None else output.permute(self.order)

    def output(self, product: Tensor) -> Tensor:
        """Return the function's output from the product."""
        return (
            product
            if self.order is None
            else product.permute([self.order.index(n) for n in range(product.dim())])
        )


class FunctionMode(TorchFunctionMode):
    """See torch's functions while the mode is on."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, getattr(func, "__name__", ""), args, kwargs or {})

    def call(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the output of a function, which may be another one."""
        raise NotImplementedError


class AttentionProducts(FunctionMode):
    """Call `on_scores` and `on_value` with a layer's q and k, and with its v.

    The tensors are the network's own, [..., L, K], of which `by_head` makes [B, A, L, K] after the
    forward pass: a layer that is checkpointed runs again without this mode, and must save the same
    tensors for its gradients.
    """

    def __init__(
        self, on_scores: Callable[[Scores], None], on_value: Callable[[Tensor], None]
    ) -> None:
        super().__init__()
        self.on_scores = on_scores
        self.on_value = on_value
        self.in_layer = False
        # By the identity of a tensor: what it is a product of, or that it is a softmax. The tensors
        # are held, so that no other one gets their identity.
        self.scores: dict[int, tuple[Tensor, Scores]] = {}
        self.weights: dict[int, Tensor] = {}

    def watch(self, in_layer: bool) -> None:
        """Begin or end to watch a layer."""
        self.in_layer = in_layer
        self.scores.clear()
        self.weights.clear()

    def call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.in_layer and name == "scaled_dot_product_attention":
            call = AttentionCall(*args, **kwargs)
            self.on_scores(Scores(call.query, call.key, call.factor))
            self.on_value(call.value)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if self.in_layer and isinstance(output, Tensor):
            if (product := product_of(name, args, kwargs)) is None:
                self._follow(name, args, kwargs, output)
            elif any(id(x) in self.weights for x in args):
                self.on_value(product.right)
            else:
                k = product.right.transpose(-1, -2)
                self.scores[id(output)] = output, Scores(product.left, k, product.scale)
        return output

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        for x in [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]:
            if x.shape[-2:] != output.shape[-2:] or x.numel() != output.numel():
                continue
            if id(x) in self.weights:
                self.weights[id(output)] = output
            elif id(x) in self.scores:
                scores = self.scores.pop(id(x))[1]
                if name == "softmax":
                    self.weights[id(output)] = output
                    self.on_scores(scores)
                else:
                    scores = replace(scores, scale=_scaled(scores.scale, name, args, x))
                    self.scores[id(output)] = output, scores


def _scaled(
    scale: Tensor | float, name: str, args: tuple[Any, ...], scores: Tensor
) -> Tensor | float:
    """Return the scale after a function that keeps the scores' shape.

    A factor for each pair of tokens, such as a mask, is no scale.
    """
    if name not in MULTIPLY + DIVIDE or len(args) < 2:
        return scale
    factor: Tensor | float = args[1] if args[0] is scores else args[0]
    if isinstance(factor, Tensor) and factor.dim() > 0 and factor.shape[-2:].numel() > 1:
        return scale
    return scale * factor if name in MULTIPLY else scale / factor


def product_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product that a function computes, or None if it is none of tensors with rows."""
    if name == "einsum" and isinstance(args[-1], list | tuple):
        # The operands may also be given as one list.
        args = (*args[:-1], *args[-1])
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if name == "einsum":
        return _einsum(args[0], tensors) if isinstance(args[0], str) else None
    if name not in ("matmul", "bmm", "baddbmm") or min(x.dim() for x in tensors[-2:]) < 3:
        return None
    # The last two, because baddbmm adds its first tensor to the product.
    return Product(tensors[-2], tensors[-1], float(kwargs.get("alpha", 1.0)))


def _einsum(equation: str, tensors: list[Tensor]) -> Product | None:
    inputs, _, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2 or "." in equation or not output:
        return None
    left, right = names
    both = [name for name in output if name in left and name in right]
    summed = [name for name in left if name in right and name not in output]
    rows, columns = (
        [name for name in side if name not in other]
        for side, other in ((left, right), (right, left))
    )
    if not len(rows) == len(columns) == len(summed) == 1:
        return None
    return Product(
        tensors[0].permute([left.index(name) for name in (*both, *rows, *summed)]),
        tensors[1].permute([right.index(name) for name in (*both, *summed, *columns)]),
        order=tuple(output.index(name) for name in (*both, *rows, *columns)),
    )


def by_head(x: Tensor, q: Tensor, rows: int) -> Tensor:
    """Return q, k or v of a layer as [B, A, L, K].

    Args:
        x: q, k or v, [..., L, K]. Several heads of `q` may read one head of k and v.
        q: The layer's q.
        rows: The number of texts, B.
    """
    batch = q.shape[:-2]
    if x.dim() == q.dim() and x.shape[:-2] != batch:
        groups = x.shape[-3]
        if groups not in (1, batch[-1]):
            x = x.repeat_interleave(batch[-1] // groups, dim=-3)
        x = x.expand(*batch, *x.shape[-2:])
    return x.reshape(rows, -1, *x.shape[-2:])
