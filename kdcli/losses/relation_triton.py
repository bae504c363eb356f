"""The relation losses of `kdcli.losses.relation` as Triton kernels: no [L, L] tensor is in memory.

`_rows` holds a block of queries. Its first pass over the keys finds of both softmaxes the running maximum, the
normaliser and Σ exp(t)(t - s): the value. Its second pass knows the probabilities, and sums the gradient of x.
`_columns` holds a block of keys and sums the gradient of y over the queries. The squared error of scores needs no first
pass.

M and N are queries and keys of a block; J and K, the widths of student and teacher, are padded to powers of two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MASKED = tl.constexpr(-1e30)
# Differences of probabilities go into float16 products; unscaled, those of long rows would be subnormal there.
UP = tl.constexpr(1024.0)
NO_MASK, KEYS, PAIRS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _tile(x, stride_l, stride_k, at, length, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Tokens `at` of one head, [len(at), PADDED], 0 beyond length and width."""
    k = tl.arange(0, PADDED)
    inside = (at[:, None] < length) & (k[None, :] < WIDTH)
    return tl.load(x + at[:, None] * stride_l + k[None, :] * stride_k, mask=inside, other=0.0)


@triton.jit
def _allowed(mask, stride_i, stride_j, i, j, length, MASK: tl.constexpr):
    """Which of the queries i may attend to which of the keys j; either is a row, the other a column of numbers."""
    inside = (i < length) & (j < length)
    if MASK == KEYS:
        inside = inside & (tl.load(mask + j * stride_j, mask=j < length, other=0) != 0)
    if MASK == PAIRS:
        inside = inside & (tl.load(mask + i * stride_i + j * stride_j, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _scores(x, y, scale, allowed, PRECISION: tl.constexpr):
    return tl.where(allowed, tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale, MASKED)


@triton.jit
def _error(s, t, s_max, s_share, t_max, t_share, KL: tl.constexpr):
    """∂ loss / ∂ student's scores, up to a factor a row; 0 at masked pairs."""
    return (tl.exp(s - s_max) * s_share - tl.exp(t - t_max) * t_share) * UP if KL else s - t


@triton.jit
def _rows(
    s_x, sx_b, sx_a, sx_l, sx_k, s_y, sy_b, sy_a, sy_l, sy_k,
    t_x, tx_b, tx_a, tx_l, tx_k, t_y, ty_b, ty_a, ty_l, ty_k,
    mask, mask_b, mask_i, mask_j, weight, values, statistics, grad_x, factor, heads, length, s_scale, t_scale,
    J: tl.constexpr, K: tl.constexpr, JP: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KL: tl.constexpr, MASK: tl.constexpr, GRAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Value [B, A, L] of each query and, if GRAD, the gradient of the student's x and `statistics` [B, A, 4, L]."""
    blocks = tl.cdiv(length, M)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, a = head // heads, head % heads
    i = tl.program_id(0) % blocks * M + tl.arange(0, M)
    s_y += b * sy_b + a * sy_a
    t_y += b * ty_b + a * ty_a
    mask += b * mask_b
    xs = _tile(s_x + b * sx_b + a * sx_a, sx_l, sx_k, i, length, J, JP)
    xt = _tile(t_x + b * tx_b + a * tx_a, tx_l, tx_k, i, length, K, KP)
    s_max, t_max = tl.full([M], MASKED, tl.float32), tl.full([M], MASKED, tl.float32)
    s_sum, t_sum, value = (
        tl.zeros([M], tl.float32),
        tl.zeros([M], tl.float32),
        tl.zeros([M], tl.float32),
    )
    if KL:
        for start in range(0, length, N):
            j = start + tl.arange(0, N)
            allowed = _allowed(mask, mask_i, mask_j, i[:, None], j[None, :], length, MASK)
            s = _scores(xs, _tile(s_y, sy_l, sy_k, j, length, J, JP), s_scale, allowed, PRECISION)
            t = _scores(xt, _tile(t_y, ty_l, ty_k, j, length, K, KP), t_scale, allowed, PRECISION)
            most = tl.maximum(s_max, tl.max(s, 1))
            s_sum = s_sum * tl.exp(s_max - most) + tl.sum(tl.exp(s - most[:, None]), 1)
            s_max = most
            most = tl.maximum(t_max, tl.max(t, 1))
            kept, p = tl.exp(t_max - most), tl.exp(t - most[:, None])
            t_sum = t_sum * kept + tl.sum(p, 1)
            value = value * kept + tl.sum(p * (t - s), 1)
            t_max = most
        # log p = score - log Z and Σ p_T = 1: each log Z enters once.
        value = value / t_sum + (s_max - t_max) + tl.log(s_sum / t_sum)
        s_sum, t_sum = 1 / s_sum, 1 / t_sum
    if GRAD or not KL:
        grad = tl.zeros([M, JP], tl.float32)
        for start in range(0, length, N):
            j = start + tl.arange(0, N)
            allowed = _allowed(mask, mask_i, mask_j, i[:, None], j[None, :], length, MASK)
            ys = _tile(s_y, sy_l, sy_k, j, length, J, JP)
            s = _scores(xs, ys, s_scale, allowed, PRECISION)
            t = _scores(xt, _tile(t_y, ty_l, ty_k, j, length, K, KP), t_scale, allowed, PRECISION)
            error = _error(s, t, s_max[:, None], s_sum[:, None], t_max[:, None], t_sum[:, None], KL)
            if not KL:
                value += tl.sum(error * error, 1)
            if GRAD:
                grad = tl.dot(error.to(ys.dtype), ys, grad, input_precision=PRECISION)
        if GRAD:
            of_row = tl.load(weight + b * length + i, mask=i < length, other=0.0) * tl.load(factor)
            k = tl.arange(0, JP)
            at = (head * length + i)[:, None] * J + k[None, :]
            tl.store(
                grad_x + at, grad * of_row[:, None], mask=(i[:, None] < length) & (k[None, :] < J)
            )
            if KL:
                at = statistics + head * 4 * length + i
                tl.store(at, s_max, mask=i < length)
                tl.store(at + length, s_sum, mask=i < length)
                tl.store(at + 2 * length, t_max, mask=i < length)
                tl.store(at + 3 * length, t_sum, mask=i < length)
    tl.store(values + head * length + i, value, mask=i < length)


@triton.jit
def _columns(
    s_x, sx_b, sx_a, sx_l, sx_k, s_y, sy_b, sy_a, sy_l, sy_k,
    t_x, tx_b, tx_a, tx_l, tx_k, t_y, ty_b, ty_a, ty_l, ty_k,
    mask, mask_b, mask_i, mask_j, weight, statistics, grad_y, factor, heads, length, s_scale, t_scale,
    J: tl.constexpr, K: tl.constexpr, JP: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the student's y, from the rows' maxima and normalisers."""
    blocks = tl.cdiv(length, N)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, a = head // heads, head % heads
    j = tl.program_id(0) % blocks * N + tl.arange(0, N)
    s_x += b * sx_b + a * sx_a
    t_x += b * tx_b + a * tx_a
    mask += b * mask_b
    ys = _tile(s_y + b * sy_b + a * sy_a, sy_l, sy_k, j, length, J, JP)
    yt = _tile(t_y + b * ty_b + a * ty_a, ty_l, ty_k, j, length, K, KP)
    grad = tl.zeros([N, JP], tl.float32)
    for start in range(0, length, M):
        i = start + tl.arange(0, M)
        allowed = _allowed(mask, mask_i, mask_j, i[None, :], j[:, None], length, MASK)
        xs = _tile(s_x, sx_l, sx_k, i, length, J, JP)
        s = _scores(ys, xs, s_scale, allowed, PRECISION)
        t = _scores(yt, _tile(t_x, tx_l, tx_k, i, length, K, KP), t_scale, allowed, PRECISION)
        at, inside = statistics + head * 4 * length + i[None, :], (i < length)[None, :]
        s_max, s_share, t_max, t_share = 0.0, 0.0, 0.0, 0.0
        if KL:
            s_max, s_share = tl.load(at, inside, 0.0), tl.load(at + length, inside, 0.0)
            t_max, t_share = (
                tl.load(at + 2 * length, inside, 0.0),
                tl.load(at + 3 * length, inside, 0.0),
            )
        of_row = tl.load(weight + b * length + i, mask=i < length, other=0.0)
        error = _error(s, t, s_max, s_share, t_max, t_share, KL) * of_row[None, :]
        grad = tl.dot(error.to(xs.dtype), xs, grad, input_precision=PRECISION)
    k = tl.arange(0, JP)
    at = (head * length + j)[:, None] * J + k[None, :]
    tl.store(grad_y + at, grad * tl.load(factor), mask=(j[:, None] < length) & (k[None, :] < J))


def compared(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    mask: Tensor | None,
    *,
    kl: bool,
    grad: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """`relation_kl` or, without `kl`, `score_mse` of x and y [B, A, L, J or K]: the value and, with `grad`, the float32
    gradients of the student's x and y. No input is copied but for its dtype, no value is read back."""
    student, teacher = _alike(*student), _alike(*teacher)
    (batch, heads, length, j), k, device = student[0].shape, teacher[0].shape[-1], student[0].device
    weight_BL, share = _row_weights(mask, batch, heads, length, device, kl=kl)
    values_BAL = torch.empty(batch, heads, length, device=device)
    statistics_BA4L = torch.empty(batch, heads, 4 if grad and kl else 0, length, device=device)
    grad_x, grad_y = (torch.empty(x.shape if grad else 0, device=device) for x in student)
    kind, seen, strides = _mask_of(mask, weight_BL)
    inputs = [part for x in (*student, *teacher) for part in (x, *x.stride())] + [
        seen,
        *strides,
        weight_BL,
    ]
    s_scale, t_scale = j**-0.5, k**-0.5
    sizes = share * (s_scale / UP.value if kl else 2 * s_scale), heads, length, s_scale, t_scale
    padded = [max(16, triton.next_power_of_2(width)) for width in (j, k)]
    how = {"J": j, "K": k, "JP": padded[0], "KP": padded[1], "KL": kl, "MASK": kind}
    how |= launch_options(
        max(padded), max(x.element_size() for x in (*student, *teacher)), capability_of(device)
    )
    blocks = batch * heads * triton.cdiv(length, how["M"])  # M = N
    with torch.cuda.device_of(student[0]):  # type: ignore[no-untyped-call]
        if blocks:
            _rows[(blocks,)](*inputs, values_BAL, statistics_BA4L, grad_x, *sizes, GRAD=grad, **how)
        if blocks and grad:
            _columns[(blocks,)](*inputs, statistics_BA4L, grad_y, *sizes, **how)
    loss = (values_BAL * weight_BL[:, None]).sum() * share
    return loss, (grad_x, grad_y) if grad else None


def launch_options(width: int, item: int, capability: tuple[int, int]) -> dict[str, Any]:
    """Blocks, stages and products for heads padded to `width` and numbers of `item` bytes. Larger blocks spill
    registers to memory, or exceed a card's shared memory; below 8.0 Triton has no tensor cores."""
    modern = capability >= (8, 0)
    side = max(16, min(64, 8192 // (width * item)) if modern else min(32, 1024 // width))
    # Three TF32 products give float32 products to about its own precision.
    how = {"M": side, "N": side, "PRECISION": "tf32x3" if modern else "ieee"}
    return how | {"num_warps": 4, "num_stages": 2 if modern and item == 2 else 1}


def most_width(device: torch.device) -> int:
    """Head width up to which blocks fit the shared memory of the device."""
    return 256 if capability_of(device) >= (8, 0) else 128


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; of a CPU, where only Triton's interpreter runs, that of an A100."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def _alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of one dtype that the kernels multiply; strides stay."""
    dtype = (
        x.dtype
        if x.dtype == y.dtype and x.dtype in (torch.float16, torch.bfloat16)
        else torch.float32
    )
    return x.to(dtype), y.to(dtype)


def _mask_of(mask: Tensor | None, placeholder: Tensor) -> tuple[int, Tensor, tuple[int, ...]]:
    """Kind, bytes, and strides of sequence, query and key."""
    if mask is None:
        return NO_MASK.value, placeholder, (0, 0, 0)
    seen = mask.bool().view(torch.uint8)
    b, *_, i, j = seen.stride() if mask.dim() == 4 else (seen.stride(0), 0, seen.stride(1))
    return (PAIRS if mask.dim() == 4 else KEYS).value, seen, (b, i, j)


def _row_weights(
    mask: Tensor | None, batch: int, heads: int, length: int, device: torch.device, *, kl: bool
) -> tuple[Tensor, Tensor]:
    """Weight of each query in a mean over real ones, [B, L], and 1 / (heads · real queries), a scalar on the device."""
    if mask is None:
        real_BL, keys = (
            torch.ones(batch, length, device=device),
            torch.full((), length, device=device),
        )
    elif mask.dim() == 2:
        real_BL, keys = mask.bool().float(), mask.bool().sum(-1, keepdim=True)
    else:
        real_BL, keys = mask.any(-1)[:, 0].float(), mask.bool().sum(-1)[:, 0]
    share = 1 / (heads * real_BL.sum().clamp(min=1))
    return real_BL if kl else real_BL / keys.clamp(min=1), share
