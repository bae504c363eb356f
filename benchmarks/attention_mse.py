"""Compare TinyBERT's loss on attention scores with the plain formula.

    python benchmarks/attention_mse.py [--threads 2] [--rounds 7] [--rows 8] [--length 512]
    [--layers 4]

Prints ratios of time and of extra memory, and the differences of value and gradients. Models have
12 heads with 64 (teacher) and 26 (student) dimensions, in float32, and rows have different lengths.
A step is the forward and backward pass of the sum over the layers. Times are medians of interleaved
rounds. Memory is the growth of a process's peak, and each variant runs in a process of its own: the
plain formula keeps the scores of all layers until the backward pass.
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
    """Compute the loss as its formula says: the mean squared difference of the scores.

    Only pairs of real queries and keys count.
    """
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

    def draw(width: int) -> Tensor:
        return torch.randn(rows, HEADS, length, width, generator=generator)

    drawn = []
    for _ in range(layers):
        teacher = draw(TEACHER), draw(TEACHER)
        student = draw(STUDENT).requires_grad_(), draw(STUDENT).requires_grad_()
        drawn.append((*teacher, *student))
    lengths = torch.linspace(length // 2, length, rows).long()
    return drawn, (torch.arange(length)[None] < lengths[:, None]).long()


def step(name: str, layers: list[Layer], mask: Tensor) -> tuple[float, list[Tensor]]:
    """Return the loss of all layers and its gradients."""
    total = torch.stack([WAYS[name](*layer, mask) for layer in layers]).sum()
    of_student = [x for layer in layers for x in layer[2:]]
    return total.item(), list(torch.autograd.grad(total, of_student))


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
    # Measure memory before this process grows, because a child starts with its parent's peak.
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
    results = {}
    for _ in range(options.rounds + 1):
        for name in WAYS:
            began = time.perf_counter()
            results[name] = step(name, layers, mask)
            seconds[name].append(time.perf_counter() - began)
    ratios = [p / b for p, b in zip(seconds["plain"][1:], seconds["blocked"][1:], strict=True)]
    print(
        f"time     plain / blocked: {statistics.median(ratios):.1f}x  "
        f"({min(ratios):.1f}-{max(ratios):.1f})"
    )
    (value, gradients), (blocked, of_blocked) = results["plain"], results["blocked"]
    worst = max(
        (a - b).abs().max() / a.abs().max() for a, b in zip(gradients, of_blocked, strict=True)
    )
    print(
        f"value    differs by {abs(value - blocked) / value:.1e} of it, gradients by {worst:.1e} "
        "of their largest"
    )


if __name__ == "__main__":
    main()
