"""Compare the chunked losses over a vocabulary with the plain formulas.

    python benchmarks/vocabulary.py [--threads 2] [--rounds 7] [--device cpu]

Prints ratios of extra memory and time, and the differences of value and gradient. A batch has
32 x 128 tokens, 15 % of them masked, and the vocabulary has 30,522. Logits of teacher and student
are in float32 and in bfloat16. A step is the forward and backward pass of soft targets (T = 2) or
of cross-entropy. Memory is the memory of a call in addition to the logits, with the gradient that
it returns. Times are medians of interleaved rounds.
Aims: the chunked soft loss takes at most a quarter of the plain one's memory, is not slower, and
equals it to 1e-5 in float32.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kdcli.engine.memory import peak_of
from kdcli.losses.vocabulary import masked_ce, soft_kl

P, V, T = round(0.15 * 32 * 128), 30_522, 2.0


def plain_kl(teacher_PV: Tensor, student_PV: Tensor) -> Tensor:
    """Compute T² · KL(teacher ‖ student) as the formula says."""
    log_p = F.log_softmax(teacher_PV.float() / T, -1)
    log_q = F.log_softmax(student_PV.float() / T, -1)
    return T * T * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


Losses = dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]
SOFT: Losses = {
    "plain": lambda t, s, y: plain_kl(t, s),
    "chunked": lambda t, s, y: soft_kl(t, s, T),
}
HARD: Losses = {
    "plain": lambda t, s, y: F.cross_entropy(s.float(), y),
    "chunked": lambda t, s, y: masked_ce(s, y),
}


def step(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Run the forward and backward pass. The gradient stays on the student's logits."""
    inputs[1].grad = None
    value = loss(*inputs)
    torch.autograd.backward(value)
    return value.detach()


def compare(name: str, losses: Losses, inputs: tuple[Tensor, Tensor, Tensor], rounds: int) -> None:
    device, student_PV = inputs[1].device, inputs[1]
    memory: dict[str, int | None] = {}
    seconds: dict[str, list[float]] = {"plain": [], "chunked": []}
    values, gradients = {}, {}
    for way, loss in losses.items():
        step(loss, inputs)
        student_PV.grad = None
        if device.type == "cpu":
            # Return freed memory to the system. Otherwise a later call seems to need less.
            ctypes.CDLL(None).malloc_trim(0)
        memory[way] = peak_of(partial(step, loss, inputs), device)
    for _ in range(rounds):
        for way, loss in losses.items():
            began = time.perf_counter()
            values[way] = step(loss, inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[way].append(time.perf_counter() - began)
            assert student_PV.grad is not None
            gradients[way] = student_PV.grad.float()
    ratios = [p / c for p, c in zip(seconds["plain"], seconds["chunked"], strict=True)]
    worst = (gradients["plain"] - gradients["chunked"]).abs().max() / gradients["plain"].abs().max()
    plain, chunked = memory["plain"], memory["chunked"]
    if plain is not None and chunked is not None:
        print(
            f"{name:22} memory chunked / plain: {chunked / plain:.2f}  "
            f"(plain {plain / 1e6:.0f} MB, chunked {chunked / 1e6:.0f} MB)"
        )
    print(
        f"{name:22} time   plain / chunked: {statistics.median(ratios):.2f}x  "
        f"({min(ratios):.2f}-{max(ratios):.2f}, "
        f"chunked {1e3 * statistics.median(seconds['chunked']):.0f} ms)"
    )
    print(
        f"{name:22} value differs by "
        f"{abs(values['plain'] - values['chunked']) / values['plain']:.1e} of it, gradients "
        f"by {worst:.1e} of their largest"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(P, V, generator=generator) for _ in range(2)]
    labels = torch.randint(0, V, (P,), generator=generator)
    print(f"{P} masked tokens x {V} words; logits of one model in float32: {4e-6 * P * V:.0f} MB")
    for dtype in (torch.float32, torch.bfloat16):
        teacher, student, words = (
            x.to(options.device) for x in (*(x.to(dtype) for x in logits), labels)
        )
        inputs = teacher, student.clone().requires_grad_(), words
        for name, losses in (("soft targets", SOFT), ("cross-entropy", HARD)):
            compare(f"{name} {str(dtype).removeprefix('torch.')}", losses, inputs, options.rounds)


if __name__ == "__main__":
    main()
