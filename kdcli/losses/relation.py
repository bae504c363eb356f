"""Self-attention relations: their divergence and the squared error of their scores, in blocks.

A relation is `softmax(X Yᵀ/√K + mask)` of per-head vectors. It is the attention for (Q, K), the
value relation for (V, V), and MiniLMv2's Q-Q, K-K and V-V. MiniLM (arXiv 2002.10957, eq. 6 and 9)
and MiniLMv2 (arXiv 2012.15828, eq. 5) are sums of `relation_kl`. TinyBERT (arXiv 1909.10351, eq. 7)
compares the scores before the softmax with `score_mse`.

The plain formulas keep half a dozen [B, A, L, L] tensors for autograd. Here, a block of a few heads
is reduced to its share of the loss *and* to the gradient of its inputs [B, A, L, K] before the next
block starts. On a GPU, the kernels of `relation_triton.py` can do the same without a block of
scores in memory.
"""

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kdcli.errors import UsageError, first_line
from kdcli.version import install_command

VectorPair = tuple[Tensor, Tensor]
# `torch`, `triton` (on CUDA devices) or `auto`, which uses triton if its blocks can hold the heads.
KERNEL: ContextVar[str] = ContextVar("KERNEL", default="torch")
# Score of a masked position. It is far below any real score, yet finite, so that 0 · (log p - log
# q) is 0 and not NaN.
LOWEST_SCORE = -1e30
# Number of scores per block. 2 MB of float32 per buffer stay in a CPU core's cache, while a GPU
# needs enough work per launch.
BLOCK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 25}


def regroup(x_BALK: Tensor, heads: int) -> Tensor:
    """Concatenate the heads of a signal and split them into H = `heads` heads.

    Maps [B, A, L, K] to [B, H, L, AK/H]. Raises ValueError if `heads` does not divide the width
    A·K.
    """
    batch, own_heads, length, width = x_BALK.shape
    if own_heads == heads:
        return x_BALK
    if own_heads * width % heads:
        raise ValueError(f"{heads} relation heads do not divide a width of {own_heads * width}")
    x_BLHK = x_BALK.transpose(1, 2).reshape(batch, length, heads, own_heads * width // heads)
    return x_BLHK.transpose(1, 2)


def relation_kl(
    teacher_x_BALK: Tensor,
    teacher_y_BALK: Tensor,
    student_x_BALJ: Tensor,
    student_y_BALJ: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return KL(teacher ‖ student) between two relations, averaged over heads and real queries.

    The result is a float32 scalar, which is 0 if there is no real query. No gradient reaches the
    teacher. J may differ from K, and each side is scaled by its own 1/√width. Raises ValueError if
    the two sides differ in batch, heads or length.

    Args:
        teacher_x_BALK, teacher_y_BALK: The teacher's vectors.
        student_x_BALJ, student_y_BALJ: The student's vectors.
        mask: [B, L], non-zero at real tokens (padded keys are masked, and the mean skips padded
            queries); or [B, 1, L, L], True where a query may attend; or None.
    """
    teacher = (teacher_x_BALK, teacher_y_BALK)
    student = (student_x_BALJ, student_y_BALJ)
    return _compare(_RelationKL, teacher, student, mask)


def score_mse(
    teacher_x_BALK: Tensor,
    teacher_y_BALK: Tensor,
    student_x_BALJ: Tensor,
    student_y_BALJ: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return the squared error between the scores X Yᵀ/√K of two relations, before any softmax.

    The result is a float32 scalar: the mean over the keys that a query may attend to, averaged over
    heads and real queries. Sequences are therefore weighted by their tokens, and the losses of
    micro-batches, weighted by tokens, add up to the loss of the batch. No gradient reaches the
    teacher. J may differ from K, and each side is scaled by its own 1/√width. Raises ValueError if
    the two sides differ in batch, heads or length.

    Args:
        teacher_x_BALK, teacher_y_BALK: The teacher's vectors.
        student_x_BALJ, student_y_BALJ: The student's vectors.
        mask: [B, L], non-zero at real tokens; or [B, 1, L, L], True where a query may attend; or
            None.
    """
    teacher = (teacher_x_BALK, teacher_y_BALK)
    student = (student_x_BALJ, student_y_BALJ)
    return _compare(_ScoreMSE, teacher, student, mask)


def _compare(
    function: type[torch.autograd.Function],
    teacher: VectorPair,
    student: VectorPair,
    mask: Tensor | None,
) -> Tensor:
    t_shape, s_shape = list(teacher[0].shape[:3]), list(student[0].shape[:3])
    if t_shape != s_shape:
        raise ValueError(
            f"cannot compare relations of shapes {t_shape} and {s_shape} [batch, heads, tokens]: "
            "regroup the heads of one side first"
        )
    inputs = *student, *(x.detach() for x in teacher), mask
    loss: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return loss


class _GradientFromForward(torch.autograd.Function):
    """A scalar whose `forward` saves the gradients of the student's x and y."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_y = ctx.saved_tensors
        return grad_x * grad, grad_y * grad, None, None, None


class _RelationKL(_GradientFromForward):
    """x, y -> scalar, with ∂/∂scores = w (p_S - p_T).

    w is 1/(A · rows) for real rows and 0 for padding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_x: Tensor,
        student_y: Tensor,
        teacher_x: Tensor,
        teacher_y: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        if _by_triton(student_x, teacher_x):
            return _in_triton(ctx, (student_x, student_y), (teacher_x, teacher_y), mask, kl=True)
        (batch, heads, length, _), device = student_x.shape, student_x.device
        bias, real_BL = _bias_and_rows(mask)
        # Keep the number of rows on the device: reading it would wait for all queued work.
        weight_BL = None if real_BL is None else real_BL / (heads * real_BL.sum().clamp(min=1))
        scale = 1.0 / max(1, heads * batch * length) if weight_BL is None else 1.0
        s_scale, t_scale = student_x.shape[-1] ** -0.5, teacher_x.shape[-1] ** -0.5
        gradients = _empty_gradients(ctx, student_x, student_y)
        total = torch.zeros(
            (), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
        )
        blocks = _blocks(batch, heads, length, device.type)
        buffers = torch.empty(4, *student_x[blocks[0]].shape[:2], length, length, device=device)
        with torch.autocast(device.type, enabled=False):
            for block in blocks:
                sequences, _ = block
                s_x, s_y, t_x, t_y = (
                    x[block].float() for x in (student_x, student_y, teacher_x, teacher_y)
                )
                s_scores, t_scores, p_s, p_t = buffers[:, : s_x.shape[0], : s_x.shape[1]].unbind()
                _product(s_x, s_y.transpose(-1, -2), s_scale, out=s_scores)
                _product(t_x, t_y.transpose(-1, -2), t_scale, out=t_scores)
                if bias is not None:
                    s_scores += bias[sequences]
                    t_scores += bias[sequences]
                torch.softmax(s_scores, -1, out=p_s)
                torch.softmax(t_scores, -1, out=p_t)
                # log p = score - log Z and Σ p_T = 1, so each log Z enters once per row. It equals
                # max score - log max p.
                row_kl = (s_scores.amax(-1) - p_s.amax(-1).log()) - (
                    t_scores.amax(-1) - p_t.amax(-1).log()
                )
                t_scores -= s_scores
                if weight_BL is None:
                    total += torch.dot(p_t.view(-1), t_scores.view(-1)) + row_kl.sum()
                else:
                    row_kl += torch.linalg.vecdot(p_t, t_scores)
                    total += (row_kl * weight_BL[sequences, None, :]).sum()
                if gradients is not None:
                    error = p_s.sub_(p_t)
                    if weight_BL is not None:
                        error *= weight_BL[sequences, None, :, None]
                    _product(error, s_y, scale * s_scale, out=gradients[0][block])
                    _product(error.transpose(-1, -2), s_x, scale * s_scale, out=gradients[1][block])
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        return (total * scale).float()


class _ScoreMSE(_GradientFromForward):
    """x, y -> scalar Σ e² with e = √w (x_S y_Sᵀ/√J - x_T y_Tᵀ/√K) and ∂/∂scores = 2√w e.

    w is a row's share of the mean.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_x: Tensor,
        student_y: Tensor,
        teacher_x: Tensor,
        teacher_y: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        if _by_triton(student_x, teacher_x):
            return _in_triton(ctx, (student_x, student_y), (teacher_x, teacher_y), mask, kl=False)
        (batch, heads, length, _), device = student_x.shape, student_x.device
        root_BALK, real_BALK, allowed_BALL = _row_weights(mask, heads, length, batch, device)
        s_scale, t_scale = student_x.shape[-1] ** -0.5, teacher_x.shape[-1] ** -0.5
        gradients = _empty_gradients(ctx, student_x, student_y)
        total = torch.zeros(
            (), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
        )
        blocks = _blocks(batch, heads, length, device.type)
        buffer = torch.empty(*student_x[blocks[0]].shape[:2], length, length, device=device)
        with torch.autocast(device.type, enabled=False):
            for block in blocks:
                sequences, _ = block
                # Apply weights and mask to the small tensors, because a row of x is a row of
                # scores, and a row of y is a column of scores.
                root = root_BALK if len(root_BALK) == 1 else root_BALK[sequences]
                s_x, t_x = (x[block].float() * root for x in (student_x, teacher_x))
                s_y, t_y = (y[block].float() for y in (student_y, teacher_y))
                if real_BALK is not None:
                    s_y = s_y * real_BALK[sequences]
                    t_y = t_y * real_BALK[sequences]
                error = buffer[: s_x.shape[0], : s_x.shape[1]]
                _product(s_x, s_y.transpose(-1, -2), s_scale, out=error)
                _product(t_x, t_y.transpose(-1, -2), -t_scale, out=error, onto=True)
                if allowed_BALL is not None:
                    error *= allowed_BALL[sequences]
                total += torch.dot(error.view(-1), error.view(-1))
                if gradients is not None:
                    _product(error, s_y, 2 * s_scale, out=gradients[0][block])
                    gradients[0][block] *= root
                    _product(error.transpose(-1, -2), s_x, 2 * s_scale, out=gradients[1][block])
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        return total.float()


@contextmanager
def computed_by(kernel: str) -> Iterator[None]:
    """Compute relations with a `KERNEL` inside the context."""
    token = KERNEL.set(kernel)
    try:
        yield
    finally:
        KERNEL.reset(token)


def _by_triton(student_x: Tensor, teacher_x: Tensor) -> bool:
    """Return whether to use the Triton kernels.

    Raises:
        UsageError: The user asked for them, and the heads are too wide.
    """
    kernel = KERNEL.get()
    # Students are still on the CPU when the weights that no loss reaches are frozen. Only Triton's
    # interpreter runs there.
    can_run = student_x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if kernel == "torch" or not can_run:
        return False
    from kdcli.losses.relation_triton import max_width

    width = max(student_x.shape[-1], teacher_x.shape[-1])
    limit = max_width(student_x.device)
    if width > limit and kernel == "triton":
        raise UsageError(
            f"relation.kernel=triton supports heads of width {limit} at most on this card, "
            f"but the width is {width}",
            "set relation.kernel=auto or torch",
        )
    return width <= limit


def _in_triton(
    ctx: Any, student: VectorPair, teacher: VectorPair, mask: Tensor | None, *, kl: bool
) -> Tensor:
    from kdcli.losses.relation_triton import compare_relations

    loss, gradients = compare_relations(
        student, teacher, mask, kl=kl, grad=any(ctx.needs_input_grad[:2])
    )
    if gradients is not None:
        ctx.save_for_backward(*gradients)
    return loss


@functools.cache
def why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot run here, or None if they can.

    They can run if they reproduce PyTorch's loss and gradients on a small input.
    """
    if device.type != "cuda":
        return f"it needs a CUDA device, but the device is {device}"
    if find_spec("triton") is None:
        return f"triton is not installed: {install_command('triton')}"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if major < 6:
        return f"it needs compute capability 6.0, but {name} has {major}.{minor}"
    from triton.errors import TritonError

    wave = torch.linspace(-2, 2, 2 * 2 * 40 * 24, device=device).sin()
    x_BALK = wave.view(2, 2, 40, 24).to(dtype)
    inputs = x_BALK, x_BALK, x_BALK.flip(-1), x_BALK.flip(-2)
    mask = torch.arange(40, device=device) < torch.tensor([[40], [23]], device=device)
    try:
        expected = _value_and_gradients("torch", *inputs, mask)
        values = _value_and_gradients("triton", *inputs, mask)
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"it fails on {name}: {first_line(error)}"
    pairs = zip(expected, values, strict=True)
    largest_error = max(float((a - b).norm() / a.norm()) for a, b in pairs)
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    if largest_error < tolerance:
        return None
    return f"it differs by {largest_error:.1e} from PyTorch on {name}"


def _value_and_gradients(
    kernel: str, t_x: Tensor, t_y: Tensor, s_x: Tensor, s_y: Tensor, mask: Tensor
) -> list[Tensor]:
    leaves = s_x.detach().requires_grad_(), s_y.detach().requires_grad_()
    with computed_by(kernel):
        loss = relation_kl(t_x, t_y, *leaves, mask)
    return [loss.detach(), *(gradient.float() for gradient in torch.autograd.grad(loss, leaves))]


def _row_weights(
    mask: Tensor | None, heads: int, length: int, batch: int, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what weighs and masks the scores.

    Returns:
        √w of each query, [B or 1, 1, L or 1, 1], with w = 1/(heads · rows · keys), 0 for padding.
        The real keys [B, 1, L, 1], for a mask [B, L].
        The pairs that may attend, for a mask [B, 1, L, L].
    """
    if mask is None:
        share = 1 / max(1, heads * batch * length * length)
        return torch.full((1, 1, 1, 1), share**0.5, device=device), None, None
    allowed = mask.bool().float()
    if mask.dim() == 2:
        keys_BL = allowed.sum(-1, keepdim=True).clamp(min=1)
        weight_BL = allowed / (keys_BL * heads * allowed.sum().clamp(min=1))
        return weight_BL.sqrt()[:, None, :, None], allowed[:, None, :, None], None
    keys_BL = allowed.sum(-1)[:, 0]
    real_BL = (keys_BL > 0).float()
    weight_BL = real_BL / (keys_BL.clamp(min=1) * heads * real_BL.sum().clamp(min=1))
    return weight_BL.sqrt()[:, None, :, None], None, allowed


def _empty_gradients(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Allocate the float32 gradients of the student's x and y, or None if neither needs one."""
    if not any(ctx.needs_input_grad[:2]):
        return None
    return torch.empty(x.shape, device=x.device), torch.empty(y.shape, device=y.device)


def _product(
    x_BAIK: Tensor, y_BAKJ: Tensor, scale: float, *, out: Tensor, onto: bool = False
) -> None:
    """Write `scale` · x y to the contiguous block `out`, without allocating. `onto` adds
    instead."""
    flat = out.view(-1, *out.shape[2:])
    x, y = x_BAIK.flatten(0, 1), y_BAKJ.flatten(0, 1)
    torch.baddbmm(flat, x, y, beta=float(onto), alpha=scale, out=flat)


def _bias_and_rows(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return an additive mask, broadcastable to [B, A, L, L], and float row weights [B, L]."""
    if mask is None:
        return None, None
    allowed = mask.bool()
    bias = torch.zeros(allowed.shape, device=mask.device).masked_fill_(~allowed, LOWEST_SCORE)
    if allowed.dim() == 2:
        return bias[:, None, None, :], allowed.float()
    return bias, allowed.any(-1)[:, 0].float()


def _blocks(batch: int, heads: int, length: int, device: str) -> list[tuple[slice, slice]]:
    """Split [B, A] into blocks of at most `BLOCK_SCORES` scores.

    A block consists of heads of one sequence, or of whole sequences.
    """
    at_once = max(1, BLOCK_SCORES.get(device, BLOCK_SCORES["cuda"]) // (length * length))
    if at_once >= heads:
        step = at_once // heads
        return [(slice(b, b + step), slice(0, heads)) for b in range(0, batch, step)]
    return [
        (slice(b, b + 1), slice(a, a + at_once))
        for b in range(batch)
        for a in range(0, heads, at_once)
    ]
