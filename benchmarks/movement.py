"""Measure what a fine-tuned model loses if weights are removed at once by their movement scores.

    python benchmarks/movement.py FINETUNED TRAIN.jsonl.gz [--steps 100] [--rows 384]
                                  [--text sentence] [--label label]

The scores are the ones of movement pruning at full density, S ← −α Σ ∂L/∂W · W with AdamW, in steps
of 32 rows. The model's weights do not change. Then a share of each matrix is removed at once: the
weights with the lowest scores, as in movement pruning, the ones with the highest scores, the
smallest weights, or random ones. The model is evaluated on rows that were not used for the scores.
This script does not use kdcli.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SHARES = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
BATCH = 32


def linears(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the linears in the encoder's layers, by name."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))
    }


def scores_of(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    weights = linears(model)
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is weight for weight in weights.values()))
    scores = {name: nn.Parameter(torch.zeros_like(weight)) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(scores.values(), lr=1e-2, weight_decay=0.0)
    for batch in batches:
        model(**batch).loss.backward()
        for name, weight in weights.items():
            assert weight.grad is not None
            scores[name].grad = weight.grad * weight.detach()
            weight.grad = None
        optimizer.step()
    return {name: score.detach() for name, score in scores.items()}


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[dict[str, Tensor]]) -> str:
    losses, right, differences = [], [], []
    for batch in batches:
        output = model(**batch)
        losses.append(float(output.loss))
        right.append((output.logits.argmax(-1) == batch["labels"]).float())
        differences.append(output.logits[:, 1] - output.logits[:, 0])
    d = torch.cat(differences)
    accuracy = float(torch.cat(right).mean())
    return (
        f"loss {sum(losses) / len(losses):.3f}  accuracy {accuracy:.3f}  difference "
        f"{d.mean():+.2f} ± {d.std():.2f}"
    )


@torch.no_grad()
def remove(
    weights: dict[str, Tensor],
    whole: dict[str, Tensor],
    order: dict[str, Tensor],
    share: float,
) -> None:
    """Set a share of each matrix to zero and restore its other weights.

    Args:
        weights: the weights, which are changed.
        whole: their original values.
        order: a number for each weight. The lowest numbers are set to zero.
        share: the share of each matrix.
    """
    for name, weight in weights.items():
        weight.copy_(whole[name])
        gone = (
            order[name].flatten().topk(max(1, int(share * weight.numel())), largest=False).indices
        )
        weight.view(-1)[gone] = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--text", default="sentence")
    parser.add_argument("--label", default="label")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(options.model).eval()
    with gzip.open(options.data, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(0).shuffle(rows)

    def batches(part: list[dict[str, str]]) -> list[dict[str, Tensor]]:
        tokenized = []
        for at in range(0, len(part), BATCH):
            some = part[at : at + BATCH]
            texts = [row[options.text] for row in some]
            batch = tokenizer(
                texts, padding=True, truncation=True, max_length=128, return_tensors="pt"
            )
            tokenized.append(
                {**batch, "labels": torch.tensor([int(row[options.label]) for row in some])}
            )
        return tokenized

    seen = options.steps * BATCH
    scores, held_out = (
        scores_of(model, batches(rows[:seen])),
        batches(rows[seen : seen + options.rows]),
    )
    weights = linears(model)
    whole = {name: weight.detach().clone() for name, weight in weights.items()}
    orders = {
        "lowest scores": scores,
        "highest scores": {name: -score for name, score in scores.items()},
        "smallest weights": {name: weight.abs() for name, weight in whole.items()},
        "at random": {name: torch.rand_like(weight) for name, weight in whole.items()},
    }
    print(f"all weights: {evaluate(model, held_out)}")
    for share in SHARES:
        for name, order in orders.items():
            remove(weights, whole, order, share)
            print(f"{share:.2%} gone, {name:16}: {evaluate(model, held_out)}", flush=True)


if __name__ == "__main__":
    main()
