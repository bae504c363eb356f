"""Faster dropout and bfloat16 attention for training on a CPU.

docs/evidence/speed.md has the measurements.

* Dropout: PyTorch draws one number per element, in a single thread. Here, one 64-bit word decides
  four elements. The rate is exact to 1/131,072. Kept elements are scaled by the rounded rate, so
  the expectation is exact.
* Attention in bfloat16: PyTorch's backward pass is slow. Up to `SHORT` tokens, the explicit formula
  is faster.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kdcli.attention import AttentionCall

LEVELS = 1 << 16
SHORT = 256
"""Maximum number of tokens for the explicit formula of bfloat16 attention.

Up to this length, it is at least as fast as PyTorch's kernel in a forward and backward pass.
"""


def fast_cpu_kernels(
    device: torch.device, models: Iterable[nn.Module]
) -> AbstractContextManager[object]:
    """Return a context in which dropout and attention on a CPU use these kernels.

    It does nothing on other devices. Random numbers come from PyTorch's generator, so they depend
    on the seed and not on the number of threads. In float32 without dropout nothing is intercepted,
    because intercepting every function costs a tiny model a twelfth of its step.
    """
    if device.type != "cpu":
        return nullcontext()
    drops = any(isinstance(m, nn.Dropout) and m.p > 0 for model in models for m in model.modules())
    return _FastKernels() if drops or torch.is_autocast_enabled("cpu") else nullcontext()


def keep_mask(shape: Iterable[int], rate: float, dtype: torch.dtype) -> Tensor:
    """Return a dropout mask: 0 with probability `rate`, and 1 / (share kept) otherwise."""
    shape = tuple(shape)
    dropped = round(rate * LEVELS)
    words = torch.empty(-(-math.prod(shape) // 4), dtype=torch.int64).random_(-(1 << 63), None)
    level = words.view(torch.int16)[: math.prod(shape)].view(shape)
    return (level >= dropped - LEVELS // 2).to(dtype).mul_(LEVELS / (LEVELS - dropped))


class _FastKernels(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return _KERNELS.get(func, func)(*args, **(kwargs or {}))


def _drops(x: Tensor, rate: float) -> bool:
    return x.device.type == "cpu" and x.is_floating_point() and 0 < round(rate * LEVELS) < LEVELS


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not _drops(input, p):
        return F.dropout(input, p, training, inplace)
    return input * keep_mask(input.shape, p, input.dtype)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    call = AttentionCall(*args, **kwargs)
    query, key = call.query, call.key
    drops = _drops(query, call.dropout_p)
    short = key.shape[-2] <= SHORT and query.dtype == torch.bfloat16 and query.device.type == "cpu"
    backward = torch.is_grad_enabled() and query.requires_grad
    if call.is_causal or call.enable_gqa or not (drops or (short and backward)):
        return F.scaled_dot_product_attention(*args, **kwargs)
    scores = call.masked((query * call.factor) @ key.transpose(-1, -2))
    probabilities = scores.softmax(-1)
    if drops:
        probabilities = probabilities * keep_mask(
            probabilities.shape, call.dropout_p, probabilities.dtype
        )
    return probabilities @ call.value


_KERNELS: Mapping[Callable[..., object], Callable[..., object]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
}
