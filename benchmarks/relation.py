"""Compare the relation loss with the plain formula: time, extra memory, value and gradients.

    python benchmarks/relation.py [--threads 2] [--rounds 7]

A batch has 8 rows of 512 tokens. Heads have 64 (teacher) and 32 (student) dimensions, and there are
12. A step is the forward and backward pass of the attention and value relations in float32. Times
are medians of interleaved rounds. Memory is the growth of a process's peak, and each variant runs
in a process of its own. Aims: 5 times as fast, a fifth of the memory, equal to 1e-5.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import Queue

import torch
from torch import Tensor

from kdcli.losses.relation import relation_kl

B, A, L, K, J = 8, 12, 512, 64, 32
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(
    t_x: torch.Tensor, t_y: torch.Tensor, s_x: torch.Tensor, s_y: torch.Tensor
) -> torch.Tensor:
    """Compute KL(softmax(t) || softmax(s)) as the formula says, averaged over heads and rows."""
    p = (t_x @ t_y.transpose(-1, -2) / t_x.shape[-1] ** 0.5).softmax(-1)
    log_q = (s_x @ s_y.transpose(-1, -2) / s_x.shape[-1] ** 0.5).log_softmax(-1)
    loss: Tensor = (p * (p.clamp_min(1e-30).log() - log_q)).sum(-1).mean()
    return loss


def blocked(
    t_x: torch.Tensor, t_y: torch.Tensor, s_x: torch.Tensor, s_y: torch.Tensor
) -> torch.Tensor:
    return relation_kl(t_x, t_y, s_x, s_y, None)


def inputs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    teacher = [torch.randn(B, A, L, K, generator=generator) for _ in range(3)]
    student = [torch.randn(B, A, L, J, generator=generator).requires_grad_() for _ in range(3)]
    return teacher, student


def step(loss: Loss, teacher: list[Tensor], student: list[Tensor]) -> Tensor:
    """Run the forward and backward pass of both relations.

    The gradients stay on the student's tensors.
    """
    for x in student:
        x.grad = None
    (tq, tk, tv), (sq, sk, sv) = teacher, student
    value = loss(tq, tk, sq, sk) + loss(tv, tv, sv, sv)
    torch.autograd.backward(value)
    return value.detach()


def peak_growth(name: str, threads: int, answer: Queue[int]) -> None:
    torch.set_num_threads(threads)
    teacher, student = inputs()
    small = [x[:1, :1] for x in teacher], [x[:1, :1].detach().requires_grad_() for x in student]
    step({"plain": plain, "blocked": blocked}[name], *small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step({"plain": plain, "blocked": blocked}[name], teacher, student)
    answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    # Measure memory before this process grows, because a child starts with its parent's peak.
    memory = {}
    context = multiprocessing.get_context("spawn")
    for name in ("plain", "blocked"):
        answer = context.Queue()
        worker = context.Process(target=peak_growth, args=(name, options.threads, answer))
        worker.start()
        memory[name] = answer.get()
        worker.join()
    print(
        f"memory   plain / blocked: {memory['plain'] / max(1, memory['blocked']):.1f}x  {memory} "
        "kB beyond the inputs"
    )
    torch.set_num_threads(options.threads)
    teacher, student = inputs()
    seconds: dict[str, list[float]] = {"plain": [], "blocked": []}
    values, gradients = {}, {}
    for _ in range(options.rounds + 1):
        for name, loss in (("plain", plain), ("blocked", blocked)):
            began = time.perf_counter()
            values[name] = step(loss, teacher, student)
            seconds[name].append(time.perf_counter() - began)
            gradients[name] = [x.grad.clone() for x in student if x.grad is not None]
    ratios = [p / b for p, b in zip(seconds["plain"][1:], seconds["blocked"][1:], strict=True)]
    print(
        f"time     plain / blocked: {statistics.median(ratios):.1f}x  "
        f"({min(ratios):.1f}-{max(ratios):.1f})"
    )
    worst = max(
        (a - b).abs().max() / a.abs().max() for a, b in zip(*gradients.values(), strict=True)
    )
    print(
        f"value    differs by {abs(values['plain'] - values['blocked']):.1e}, gradients by "
        f"{worst:.1e} of their largest"
    )


if __name__ == "__main__":
    main()
