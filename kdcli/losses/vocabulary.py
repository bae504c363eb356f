"""Losses over a whole vocabulary, in chunks of rows: cross-entropy and the divergence from a teacher's soft targets.

The plain formulas add several float32 tensors as large as the logits [P, V]. Here a chunk of a few rows is reduced to
its loss *and* to the gradient of its logits before the next one starts; only that gradient, in the logits' dtype, is
kept.
"""

from typing import Any

import torch
from torch import Tensor

from kdcli.types import Signals

# Logits in float32 at once: four buffers of 512 kB stay in a CPU core's cache; a GPU needs more work per launch.
CHUNK_LOGITS = {"cpu": 1 << 17, "cuda": 1 << 21}
# Differences of probabilities are kept times this until the backward pass: float16 would round small ones to 0 before
# the loss scale. A power of two changes no digit, and 2^14 is within float16's range.
KEPT = 2.0**14


def labels_of(signals: Signals) -> Tensor:
    """The labels of the captured logits, [P] int64. Raises ValueError: the batch had no labels."""
    if signals.labels is None or signals.labelled is None:
        raise ValueError("the batch has no labels: masked language modelling needs masked text")
    return signals.labels.flatten()[signals.labelled]


def masked_ce(logits_PV: Tensor, labels_P: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of P positions, a float32 scalar; 0 where P is 0. `smoothing`: the share of each target that
    is spread evenly over the vocabulary (Szegedy et al. 2015). Raises ValueError: not as many labels as rows of
    logits."""
    if logits_PV.shape[:-1] != labels_P.shape:
        raise ValueError(f"logits {list(logits_PV.shape)} do not fit labels {list(labels_P.shape)}")
    loss: Tensor = _Chunked.apply(logits_PV, None, labels_P, 1.0, smoothing)  # type: ignore[no-untyped-call]
    return loss


def soft_kl(teacher_PV: Tensor, student_PV: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher / T) ‖ softmax(student / T)), a mean over P positions: a float32 scalar, 0 where P is 0.
    T > 0; no gradient reaches the teacher. Raises ValueError: logits of two shapes, such as those of two vocabularies.
    """
    if teacher_PV.shape != student_PV.shape:
        shapes = f"teacher {list(teacher_PV.shape)}, student {list(student_PV.shape)}"
        raise ValueError(f"logits of two shapes cannot be compared: {shapes}")
    loss: Tensor = _Chunked.apply(student_PV, teacher_PV.detach(), None, temperature, 0.0)  # type: ignore[no-untyped-call]
    return loss


class _Chunked(torch.autograd.Function):
    """Logits -> scalar against soft targets or labels; the forward pass makes its gradient T · (p - target) / P."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: Tensor | None,
        labels: Tensor | None,
        temperature: float,
        smoothing: float,
    ) -> Tensor:
        rows, words = logits.shape
        ctx.scale = temperature / max(1, rows) / KEPT
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        device = logits.device
        total = torch.zeros(
            (), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
        )
        with torch.autocast(device.type, enabled=False):
            for chunk in _chunks(rows, words, device.type):
                x, p, z = _softmax(logits[chunk], temperature)
                if teacher is not None:
                    t, p_t, z_t = _softmax(teacher[chunk], temperature)
                    # Σ p_T (log p_T - log p_S), where both log p are x - log z.
                    t -= x
                    total += (torch.linalg.vecdot(p_t, t) / z_t + z.log() - z_t.log()).sum()
                    if gradient is not None:
                        gradient[chunk] = p.mul_(KEPT / z[:, None]).sub_(
                            p_t.mul_(KEPT / z_t[:, None])
                        )
                elif labels is not None:
                    of_label = labels[chunk, None]
                    total += (z.log() - (1 - smoothing) * x.gather(1, of_label)[:, 0]).sum()
                    if smoothing:
                        total -= smoothing * x.mean(1).sum()
                    if gradient is not None:
                        p.mul_(KEPT / z[:, None]).sub_(smoothing * KEPT / words)
                        gradient[chunk] = p.scatter_add_(
                            1, of_label, p.new_full(of_label.shape, (smoothing - 1) * KEPT)
                        )
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return (total * (temperature**2 / max(1, rows))).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradient times the scalar's, in place: a second backward pass is an autograd error."""
        (gradient,) = ctx.saved_tensors
        factor = grad.float() * ctx.scale
        for chunk in _chunks(len(gradient), gradient.shape[1], gradient.device.type):
            # In float32: the factor alone may be too small for float16.
            gradient[chunk] = gradient[chunk].float() * factor
        return gradient, None, None, None, None


def _softmax(logits_CV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits over T minus their maximum [C, V], their exponentials [C, V] and the sums [C], in float32."""
    x_CV = logits_CV.to(torch.float32, copy=True)
    x_CV -= x_CV.amax(-1, keepdim=True)
    x_CV /= temperature
    p_CV = x_CV.exp()
    return x_CV, p_CV, p_CV.sum(-1)


def _chunks(rows: int, words: int, device: str) -> list[slice]:
    at_once = max(1, CHUNK_LOGITS.get(device, CHUNK_LOGITS["cuda"]) // words)
    return [slice(begin, begin + at_once) for begin in range(0, rows, at_once)]
