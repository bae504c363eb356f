"""The relation losses of `kdcli.losses.relation` as Triton kernels: no [L, L] tensor is in memory.

Each program of `_rows` handles a block of queries. For the divergence, its first pass over the keys
computes the running maximum and the normaliser of both softmaxes, and Σ exp(t)(t - s), from which
the value follows. The second pass knows the probabilities, and sums the gradient of x. Each program
of `_columns` handles a block of keys, and sums the gradient of y over the queries. The squared
error of scores needs no first pass.

M and N are the numbers of queries and keys in a block. J and K, the widths of student and teacher,
are padded to the powers of two JP and KP.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MASKED_SCORE = tl.constexpr(-1e30)
# Differences of probabilities are scaled up for float16 products. In long rows, unscaled
# differences would be subnormal in float16.
UP = tl.constexpr(1024.0)
NO_MASK, KEY_MASK, PAIR_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _tile(x, stride_l, stride_k, at, length, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load the tokens `at` of one head, [len(at), PADDED], with 0 beyond length and width."""
    k = tl.arange(0, PADDED)
    inside = (at[:, None] < length) & (k[None, :] < WIDTH)
    return tl.load(x + at[:, None] * stride_l + k[None, :] * stride_k, mask=inside, other=0.0)


@triton.jit
def _allowed(mask, stride_i, stride_j, i, j, length, MASK: tl.constexpr):
    """Return which queries i may attend to which keys j. One of i and j is a row, one a column."""
    inside = (i < length) & (j < length)
    if MASK == KEY_MASK:
        inside = inside & (tl.load(mask + j * stride_j, mask=j < length, other=0) != 0)
    if MASK == PAIR_MASK:
        inside = inside & (tl.load(mask + i * stride_i + j * stride_j, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _scores(x, y, scale, allowed, PRECISION: tl.constexpr):
    return tl.where(
        allowed, tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale, MASKED_SCORE
    )


@triton.jit
def _error(s, t, s_max, s_share, t_max, t_share, KL: tl.constexpr):
    """Return ∂ loss / ∂ student's scores, up to a factor per row, and 0 at masked pairs."""
    return (tl.exp(s - s_max) * s_share - tl.exp(t - t_max) * t_share) * UP if KL else s - t


@triton.jit
def _rows(
    s_x, sx_b, sx_a, sx_l, sx_k, s_y, sy_b, sy_a, sy_l, sy_k,
    t_x, tx_b, tx_a, tx_l, tx_k, t_y, ty_b, ty_a, ty_l, ty_k,
    mask, mask_b, mask_i, mask_j, weight, values, statistics, grad_x, factor,
    heads, length, s_scale, t_scale,
    J: tl.constexpr, K: tl.constexpr, JP: tl.constexpr, KP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    KL: tl.constexpr, MASK: tl.constexpr, GRAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the value of each query, [B, A, L].

    With GRAD, also compute the gradient of the student's x and the `statistics` [B, A, 4, L].
    """
    blocks = tl.cdiv(length, M)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, a = head // heads, head % heads
    i = tl.program_id(0) % blocks * M + tl.arange(0, M)
    s_y += b * sy_b + a * sy_a
    t_y += b * ty_b + a * ty_a
    mask += b * mask_b
    xs = _tile(s_x + b * sx_b + a * sx_a, sx_l, sx_k, i, length, J, JP)
    xt = _tile(t_x + b * tx_b + a * tx_a, tx_l, tx_k, i, length, K, KP)
    s_max = tl.full([M], MASKED_SCORE, tl.float32)
    t_max = tl.full([M], MASKED_SCORE, tl.float32)
    s_sum, t_sum = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    value = tl.zeros([M], tl.float32)
    if KL:
        for start in range(0, length, N):
            j = start + tl.arange(0, N)
            allowed = _allowed(mask, mask_i, mask_j, i[:, None], j[None, :], length, MASK)
            s = _scores(xs, _tile(s_y, sy_l, sy_k, j, length, J, JP), s_scale, allowed, PRECISION)
            t = _scores(xt, _tile(t_y, ty_l, ty_k, j, length, K, KP), t_scale, allowed, PRECISION)
            new_max = tl.maximum(s_max, tl.max(s, 1))
            s_sum = s_sum * tl.exp(s_max - new_max) + tl.sum(tl.exp(s - new_max[:, None]), 1)
            s_max = new_max
            new_max = tl.maximum(t_max, tl.max(t, 1))
            rescale, p = tl.exp(t_max - new_max), tl.exp(t - new_max[:, None])
            t_sum = t_sum * rescale + tl.sum(p, 1)
            value = value * rescale + tl.sum(p * (t - s), 1)
            t_max = new_max
        # log p = score - log Z and Σ p_T = 1, so each log Z enters once.
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
            row_weight = tl.load(weight + b * length + i, mask=i < length, other=0.0)
            row_weight *= tl.load(factor)
            k = tl.arange(0, JP)
            at = (head * length + i)[:, None] * J + k[None, :]
            inside = (i[:, None] < length) & (k[None, :] < J)
            tl.store(grad_x + at, grad * row_weight[:, None], mask=inside)
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
    mask, mask_b, mask_i, mask_j, weight, statistics, grad_y, factor,
    heads, length, s_scale, t_scale,
    J: tl.constexpr, K: tl.constexpr, JP: tl.constexpr, KP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
    KL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the student's y from the rows' maxima and normalisers."""
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
        at = statistics + head * 4 * length + i[None, :]
        inside = (i < length)[None, :]
        s_max, s_share, t_max, t_share = 0.0, 0.0, 0.0, 0.0
        if KL:
            s_max = tl.load(at, inside, 0.0)
            s_share = tl.load(at + length, inside, 0.0)
            t_max = tl.load(at + 2 * length, inside, 0.0)
            t_share = tl.load(at + 3 * length, inside, 0.0)
        row_weight = tl.load(weight + b * length + i, mask=i < length, other=0.0)
        error = _error(s, t, s_max, s_share, t_max, t_share, KL)
        if KL:
            error *= row_weight[None, :]
            grad = tl.dot(error.to(xs.dtype), xs, grad, input_precision=PRECISION)
        else:
            # The weights are 1 / keys. In float16, errors divided by hundreds of keys would be
            # subnormal, so the largest weight of the block is applied after the product.
            largest = tl.max(row_weight, 0)
            error *= (row_weight / tl.maximum(largest, 1e-30))[None, :]
            grad += tl.dot(error.to(xs.dtype), xs, input_precision=PRECISION) * largest
    k = tl.arange(0, JP)
    at = (head * length + j)[:, None] * J + k[None, :]
    tl.store(grad_y + at, grad * tl.load(factor), mask=(j[:, None] < length) & (k[None, :] < J))


@dataclass(frozen=True)
class LaunchOptions:
    """How the kernels are launched.

    Attributes:
        side: Queries and keys of a block.
        precision: `input_precision` of the products.
        stages: `num_stages`.
        warps: `num_warps`.
    """

    side: int
    precision: str
    stages: int
    warps: int = 4


def compare_relations(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    mask: Tensor | None,
    *,
    kl: bool,
    grad: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Compute `relation_kl` or, if `kl` is False, `score_mse`.

    Args:
        student: x and y [B, A, L, J].
        teacher: x and y [B, A, L, K].
        mask: [B, L], 1 at real tokens, or [B, 1, L, L], True where a token may attend; None if
            every token is real.
        kl: Whether to compute the divergence.
        grad: Whether to compute the gradients.

    Returns:
        The value and, with `grad`, the float32 gradients of the student's x and y. Inputs are
        copied only if their dtype has to change, and no value is read back from the device.
    """
    student, teacher = _same_dtype(*student), _same_dtype(*teacher)
    batch, heads, length, j = student[0].shape
    k = teacher[0].shape[-1]
    device = student[0].device
    weight_BL, share = _row_weights(mask, batch, heads, length, device, kl=kl)
    values_BAL = torch.empty(batch, heads, length, device=device)
    statistics_BA4L = torch.empty(batch, heads, 4 if grad and kl else 0, length, device=device)
    grad_x, grad_y = (torch.empty(x.shape if grad else 0, device=device) for x in student)
    mask_kind, mask_bytes, mask_strides = _mask_of(mask, weight_BL)
    inputs = [part for x in (*student, *teacher) for part in (x, *x.stride())]
    inputs += [mask_bytes, *mask_strides, weight_BL]
    s_scale, t_scale = j**-0.5, k**-0.5
    sizes = share * (s_scale / UP.value if kl else 2 * s_scale), heads, length, s_scale, t_scale
    padded_j, padded_k = (max(16, triton.next_power_of_2(width)) for width in (j, k))
    item = max(x.element_size() for x in (*student, *teacher))
    options = launch_options(max(padded_j, padded_k), item, capability_of(device))
    blocks = batch * heads * triton.cdiv(length, options.side)
    constants = {
        "J": j,
        "K": k,
        "JP": padded_j,
        "KP": padded_k,
        "KL": kl,
        "MASK": mask_kind,
        "M": options.side,
        "N": options.side,
        "PRECISION": options.precision,
        "num_warps": options.warps,
        "num_stages": options.stages,
    }
    with torch.cuda.device_of(student[0]):  # type: ignore[no-untyped-call]
        if blocks:
            outputs = values_BAL, statistics_BA4L, grad_x
            _rows[(blocks,)](*inputs, *outputs, *sizes, GRAD=grad, **constants)
        if blocks and grad:
            _columns[(blocks,)](*inputs, statistics_BA4L, grad_y, *sizes, **constants)
    loss = (values_BAL * weight_BL[:, None]).sum() * share
    return loss, (grad_x, grad_y) if grad else None


def launch_options(width: int, item: int, capability: tuple[int, int]) -> LaunchOptions:
    """Return how to launch the kernels for heads padded to `width` and numbers of `item` bytes.

    Larger blocks would spill registers to memory, or exceed a card's shared memory. Below compute
    capability 8.0, Triton does not use tensor cores.
    """
    modern = capability >= (8, 0)
    side = max(16, min(64, 8192 // (width * item)) if modern else min(32, 1024 // width))
    # Three TF32 products compute a float32 product to about float32's own precision.
    precision = "tf32x3" if modern else "ieee"
    return LaunchOptions(side, precision, stages=2 if modern and item == 2 else 1)


def max_width(device: torch.device) -> int:
    """Return the largest head width for which blocks fit the device's shared memory."""
    return 256 if capability_of(device) >= (8, 0) else 128


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the device's compute capability.

    For a CPU, where only Triton's interpreter runs, it is 8.0, as on an A100.
    """
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def _same_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to one dtype that the kernels multiply. The strides stay the same."""
    half = x.dtype == y.dtype and x.dtype in (torch.float16, torch.bfloat16)
    dtype = x.dtype if half else torch.float32
    return x.to(dtype), y.to(dtype)


def _mask_of(mask: Tensor | None, placeholder: Tensor) -> tuple[int, Tensor, tuple[int, ...]]:
    """Return the kind of a mask, its bytes, and its strides over sequences, queries and keys."""
    if mask is None:
        return NO_MASK.value, placeholder, (0, 0, 0)
    mask_bytes = mask.bool().view(torch.uint8)
    if mask.dim() == 4:
        b, _, i, j = mask_bytes.stride()
        return PAIR_MASK.value, mask_bytes, (b, i, j)
    b, j = mask_bytes.stride()
    return KEY_MASK.value, mask_bytes, (b, 0, j)


def _row_weights(
    mask: Tensor | None, batch: int, heads: int, length: int, device: torch.device, *, kl: bool
) -> tuple[Tensor, Tensor]:
    """Return the weight of each query in the mean over real queries.

    Returns the weights [B, L] and 1 / (heads · real queries), a scalar on the device.
    """
    if mask is None:
        real_BL = torch.ones(batch, length, device=device)
        keys = torch.full((), length, device=device)
    elif mask.dim() == 2:
        real_BL, keys = mask.bool().float(), mask.bool().sum(-1, keepdim=True)
    else:
        real_BL, keys = mask.any(-1)[:, 0].float(), mask.bool().sum(-1)[:, 0]
    share = 1 / (heads * real_BL.sum().clamp(min=1))
    return real_BL if kl else real_BL / keys.clamp(min=1), share
