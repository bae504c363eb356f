"""TinyBERT's error of attention scores against the plain formula: time, extra memory, value and
gradients, in one run.

    python benchmarks/attention_mse.py [--threads 2] [--rounds 7] [--rows 8] [--length 512]
    [--layers 4]

12 heads of 64 (teacher) and 26 (student) dims, float32, a mask of rows of different lengths,
forward and backward of the sum over layers. Times are medians of interleaved rounds; memory is the
growth of the process's peak, each way in a process of its own: the plain formula keeps scores of
every layer until the backward pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from multiprocessing.queues import Queue

import torch
from torch import Tensor

from kdcli.losses.relation import score_mse

HEADS, TEACHER, STUDENT = 12, 64, 26
Layer = tuple[Tensor, Tensor, Tensor, Tensor]


def plain(tq: Tensor, tk: Tensor, sq: Tensor, sk: Tensor, mask: Tensor) -> Tensor:
    """As the formula reads: both scores, their squared difference where query and key are real, its
    mean."""
    t = tq @ tk.transpose(-1, -2) / tq.shape[-1] ** 0.5
    s = sq @ sk.transpose(-1, -2) / sq.shape[-1] ** 0.5
    real = mask.float()
    pairs = real[:, None, :, None] * real[:, None, None, :]
    of_row = ((s - t).square() * pairs).sum(-1) / real.sum(-1)[:, None, None]
    loss: Tensor = of_row.sum() / (HEADS * real.sum())
    return loss


WAYS = {"plain": plain, "blocked": score_mse}


def inputs(rows: int, length: int, layers: int) -> tuple[list[Layer], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def made(width: int) -> Tensor:
        return torch.randn(rows, HEADS, length, width, generator=generator)

    found = [
        (
            made(TEACHER),
            made(TEACHER),
            made(STUDENT).requires_grad_(),
            made(STUDENT).requires_grad_(),
        )
        for _ in range(layers)
    ]
    lengths = torch.linspace(length // 2, length, rows).long()
    return found, (torch.arange(length)[None] < lengths[:, None]).long()


def step(name: str, layers: list[Layer], mask: Tensor) -> tuple[float, list[Tensor]]:
    """The loss of all layers and its gradients."""
    total = torch.stack([WAYS[name](*layer, mask) for layer in layers]).sum()
    return total.item(), list(
        torch.autograd.grad(total, [x for layer in layers for x in layer[2:]])
    )


def peak_growth(name: str, options: argparse.Namespace, answer: Queue[int]) -> None:
    torch.set_num_threads(options.threads)
    layers, mask = inputs(options.rows, options.length, options.layers)
    step(name, *inputs(1, 8, 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(name, layers, mask)
    answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("threads", 2),
        ("rounds", 7),
        ("rows", 8),
        ("length", 512),
        ("layers", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    # Before this process grows: a child starts with its parent's peak as its own.
    memory, context = {}, multiprocessing.get_context("spawn")
    for name in WAYS:
        answer = context.Queue()
        worker = context.Process(target=peak_growth, args=(name, options, answer))
        worker.start()
        memory[name] = answer.get()
        worker.join()
    print(
        f"memory   plain / blocked: {memory['plain'] / max(1, memory['blocked']):.1f}x  {memory} "
        "kB beyond the inputs"
    )
    torch.set_num_threads(options.threads)
    layers, mask = inputs(options.rows, options.length, options.layers)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    found = {}
    for _ in range(options.rounds + 1):
        for name in WAYS:
            began = time.perf_counter()
            found[name] = step(name, layers, mask)
            seconds[name].append(time.perf_counter() - began)
    ratios = [p / b for p, b in zip(seconds["plain"][1:], seconds["blocked"][1:], strict=True)]
    print(
        f"time     plain / blocked: {statistics.median(ratios):.1f}x  "
        f"({min(ratios):.1f}-{max(ratios):.1f})"
    )
    (value, gradients), (blocked, of_blocked) = found["plain"], found["blocked"]
    worst = max(
        (a - b).abs().max() / a.abs().max() for a, b in zip(gradients, of_blocked, strict=True)
    )
    print(
        f"value    differs by {abs(value - blocked) / value:.1e} of it, gradients by {worst:.1e} "
        "of their largest"
    )


if __name__ == "__main__":
    main()
