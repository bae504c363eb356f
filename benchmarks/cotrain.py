"""Compare a step of co-training with the separate steps that it replaces.

    python benchmarks/cotrain.py [--rounds 7] [--batch 8] [--length 128] [--threads 1]
                                 [--device cpu] [--teacher 6x256] [--student 4x256]

The rounds are interleaved. A step is the forward and backward pass over one batch with 15 % masked
tokens, a vocabulary of 30,522, in float32. The optimiser is the same for all, so it is not timed.

* `together`: one forward pass of each model, both losses against the labels, both divergences.
* `apart`: one step of masked language modelling for each model.
* `one-way twice`: a step of the student with a frozen teacher, and a step of the teacher with a
  frozen student. Both steps also use the labels.

Aims: together / apart at most 1.10, one-way twice / together at least 1.25.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertConfig

from kdcli.losses.ctcd import STUDENT_MODEL, TEACHER_MODEL, Weights, ctcd
from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.models.capture import Capture, capture
from kdcli.models.grammar import parse_shape
from kdcli.models.shape import student_config
from kdcli.types import IGNORED, Batch, ModelShape, Needs

V, T, WIDEST = 30_522, 1.0, 1 << 16


def random_model(shape: str, device: torch.device) -> Capture:
    """Return a masked language model with random weights, in training mode."""
    config = BertConfig(vocab_size=V)
    wanted = parse_shape(
        shape, ModelShape(WIDEST, WIDEST, 4 * WIDEST, max(1, int(shape.split("x")[1]) // 64))
    )
    model = AutoModelForMaskedLM.from_config(student_config(config, wanted)).to(device).train()
    return capture(model, Needs(masked_logits=True))


def masked(rows: int, length: int, device: torch.device) -> Batch:
    ids = torch.randint(1000, V, (rows, length))
    labels = torch.where(torch.rand(rows, length) < 0.15, ids, IGNORED)
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def summed(models: dict[str, Capture], batch: Batch, weights: Weights) -> Tensor:
    """Return the loss of a step. A model without a loss runs without gradients."""
    signals = {}
    for role, model in models.items():
        with torch.set_grad_enabled(weights.reaches(role)):
            signals[role] = model(batch)
    labels_P = labels_of(signals[STUDENT_MODEL])
    logits = {role: s.logits for role, s in signals.items()}
    terms = ctcd(lambda x: masked_ce(x, labels_P), lambda a, b: soft_kl(a, b, T), logits, weights)
    return torch.stack([weight * value for weight, value in terms.values()]).sum()


def alone(model: Capture, batch: Batch) -> Tensor:
    signals = model(batch)
    return masked_ce(signals.logits, labels_of(signals))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--teacher", default="6x256")
    parser.add_argument("--student", default="4x256")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    models = {
        TEACHER_MODEL: random_model(options.teacher, device),
        STUDENT_MODEL: random_model(options.student, device),
    }
    batch = masked(options.batch, options.length, device)

    def step(*losses: Callable[[], Tensor]) -> None:
        for loss in losses:
            torch.autograd.backward(loss())
        for model in models.values():
            model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    ways: dict[str, Callable[[], None]] = {
        "together": lambda: step(lambda: summed(models, batch, Weights(1, 1, 1, 4))),
        "apart": lambda: step(*(lambda m=m: alone(m, batch) for m in models.values())),
        "one-way twice": lambda: step(
            lambda: summed(models, batch, Weights(1, 1, 0, 0)),
            lambda: summed(models, batch, Weights(0, 0, 1, 4)),
        ),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        for way, run in ways.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[way].append(time.perf_counter() - began)
    for way, times in seconds.items():
        print(f"{way:14} {1e3 * statistics.median(times):8.0f} ms")
    for name, over, under in (
        ("together / apart", "together", "apart"),
        ("one-way twice / together", "one-way twice", "together"),
    ):
        ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
        print(f"{name:26} {statistics.median(ratios):.2f}x  ({min(ratios):.2f}-{max(ratios):.2f})")


if __name__ == "__main__":
    main()
