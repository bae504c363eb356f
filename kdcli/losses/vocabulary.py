"""Losses over a whole vocabulary: cross-entropy, and divergence from a teacher's soft targets.

The plain formulas add several float32 tensors of the size of the logits [P, V]. Here, the rows are
processed in chunks. Each chunk is reduced to its loss *and* to the gradient of its logits before
the next one starts. Only that gradient is kept, in the dtype of the logits.
"""

from typing import Any

import torch
from torch import Tensor

from kdcli.types import Signals

# Number of float32 logits per chunk. Four buffers of 512 kB stay in a CPU core's cache, while a GPU
# needs more work per launch.
CHUNK_LOGITS = {"cpu": 1 << 17, "cuda": 1 << 21}
# Differences of probabilities are stored multiplied by this factor until the backward pass.
# Otherwise float16 would round small differences to 0 before the loss scale is applied. A power of
# two changes no digit, and 2^14 is within float16's range.
STORED_SCALE = 2.0**14


def labels_of(signals: Signals) -> Tensor:
    """Return the labels of the captured logits, [P] int64.

    Raises ValueError if the batch had no labels.
    """
    if signals.labels is None or signals.labelled is None:
        raise ValueError("the batch has no labels: masked language modelling needs masked text")
    return signals.labels.flatten()[signals.labelled]


def masked_ce(logits_PV: Tensor, labels_P: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of P positions, a float32 scalar, which is 0 if P is 0.

    `smoothing` is the share of each target that is spread evenly over the vocabulary (Szegedy et
    al. 2015). Raises ValueError if the numbers of labels and rows of logits differ.
    """
    if logits_PV.shape[:-1] != labels_P.shape:
        shapes = f"{list(logits_PV.shape)} and {list(labels_P.shape)}"
        raise ValueError(f"the shapes of logits and labels do not match: {shapes}")
    return _chunked(logits_PV, None, labels_P, 1.0, smoothing)


def soft_kl(teacher_PV: Tensor, student_PV: Tensor, temperature: float) -> Tensor:
    """Return T² · KL(softmax(teacher / T) ‖ softmax(student / T)), a mean over P positions.

    The result is a float32 scalar, which is 0 if P is 0. T > 0. No gradient reaches the teacher.
    Raises ValueError if the shapes differ, for example because the vocabularies do.
    """
    if teacher_PV.shape != student_PV.shape:
        shapes = f"teacher {list(teacher_PV.shape)}, student {list(student_PV.shape)}"
        raise ValueError(f"cannot compare logits of different shapes: {shapes}")
    return _chunked(student_PV, teacher_PV.detach(), None, temperature, 0.0)


def _chunked(
    logits: Tensor,
    teacher: Tensor | None,
    labels: Tensor | None,
    temperature: float,
    smoothing: float,
) -> Tensor:
    inputs = logits, teacher, labels, temperature, smoothing
    loss: Tensor = _Chunked.apply(*inputs)  # type: ignore[no-untyped-call]
    return loss


class _Chunked(torch.autograd.Function):
    """Logits -> scalar, against soft targets or labels.

    The forward pass also computes the gradient T · (p - target) / P.
    """

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
        ctx.scale = temperature / max(1, rows) / STORED_SCALE
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
                    # Σ p_T (log p_T - log p_S), where log p = x - log z for both models.
                    t -= x
                    total += (torch.linalg.vecdot(p_t, t) / z_t + z.log() - z_t.log()).sum()
                    if gradient is not None:
                        p_t.mul_(STORED_SCALE / z_t[:, None])
                        gradient[chunk] = p.mul_(STORED_SCALE / z[:, None]).sub_(p_t)
                elif labels is not None:
                    label_C1 = labels[chunk, None]
                    total += (z.log() - (1 - smoothing) * x.gather(1, label_C1)[:, 0]).sum()
                    if smoothing:
                        total -= smoothing * x.mean(1).sum()
                    if gradient is not None:
                        p.mul_(STORED_SCALE / z[:, None]).sub_(smoothing * STORED_SCALE / words)
                        at_label = p.new_full(label_C1.shape, (smoothing - 1) * STORED_SCALE)
                        gradient[chunk] = p.scatter_add_(1, label_C1, at_label)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return (total * (temperature**2 / max(1, rows))).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the saved gradient by the scalar's, in place.

        A second backward pass therefore raises autograd's error.
        """
        (gradient,) = ctx.saved_tensors
        factor = grad.float() * ctx.scale
        for chunk in _chunks(len(gradient), gradient.shape[1], gradient.device.type):
            # Multiply in float32, because the factor alone may be too small for float16.
            gradient[chunk] = gradient[chunk].float() * factor
        return gradient, None, None, None, None


def _softmax(logits_CV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a softmax at temperature T, in float32.

    They are the logits minus their maximum, divided by T [C, V], their exponentials [C, V] and the
    sums of the exponentials [C].
    """
    x_CV = logits_CV.to(torch.float32, copy=True)
    x_CV -= x_CV.amax(-1, keepdim=True)
    x_CV /= temperature
    p_CV = x_CV.exp()
    return x_CV, p_CV, p_CV.sum(-1)


def _chunks(rows: int, words: int, device: str) -> list[slice]:
    at_once = max(1, CHUNK_LOGITS.get(device, CHUNK_LOGITS["cuda"]) // words)
    return [slice(begin, begin + at_once) for begin in range(0, rows, at_once)]
