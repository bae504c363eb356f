"""Fine-tune encoders on a sentence task the same way and compare them: was distillation worth it?

    python benchmarks/downstream.py DATA_DIR MODEL... [--task sst2] [--train 20000] [--extra 5000] [--seeds 2]

DATA_DIR holds <task>/train.jsonl.gz and validation.jsonl.gz with the fields of the hub's GLUE. MODEL is a directory, or
`copy:TEACHER:SHAPE` for the student kdcli would start from. The development set of SST-2 is small (standard
error 1.2 points), so `--extra` training rows are kept from training and judged too. All models see the same rows in the
same order with the same head initialisation; the order of models is rotated over seeds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from kdcli.data.batches import BatchOrder
from kdcli.models.load import load_encoder
from kdcli.models.shape import build_student, parse_shape
from kdcli.training.device import choose_dtype

TEXTS = {"sst2": ("sentence",), "mrpc": ("sentence1", "sentence2"), "rte": ("sentence1", "sentence2")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--task", choices=TEXTS, default="sst2")
    parser.add_argument("--train", type=int, default=20000)
    parser.add_argument("--extra", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=64)
    options = parser.parse_args()
    rows = read(options.data / options.task / "train.jsonl.gz")
    np.random.Generator(np.random.PCG64(7)).shuffle(rows)
    sets = {
        "dev": read(options.data / options.task / "validation.jsonl.gz"),
        "extra": rows[: options.extra],
    }
    train = rows[options.extra : options.extra + options.train]
    found: dict[str, dict[str, list[float]]] = {m: {k: [] for k in sets} for m in options.models}
    for seed in range(options.seeds):
        turn = options.models[seed % len(options.models) :] + options.models[: seed % len(options.models)]
        for model in turn:
            began = time.perf_counter()
            accuracy = finetune(model, train, sets, options, seed)
            for name, value in accuracy.items():
                found[model][name].append(value)
            shown = "  ".join(f"{k} {v:.4f}" for k, v in accuracy.items())
            print(f"seed {seed}  {model}  {shown}  {time.perf_counter() - began:.0f} s", flush=True)
    for name, of in sets.items():
        if of:
            print(f"\n{options.task} {name}, n = {len(of)}, standard error {math.sqrt(0.1 / len(of)):.4f}")
            for model, values in found.items():
                print(f"  {np.mean(values[name]):.4f}  {model}  {' '.join(f'{v:.4f}' for v in values[name])}")


def read(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def load(model: str) -> tuple[torch.nn.Module, object]:
    if model.startswith("copy:"):
        _, teacher, shape = model.split(":", 2)
        loaded = load_encoder(teacher)
        return build_student(loaded.model, parse_shape(shape, loaded.shape)).model, loaded.tokenizer
    return AutoModel.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)


def finetune(
    source: str, train: list[dict], sets: dict[str, list[dict]], options: argparse.Namespace, seed: int
) -> dict[str, float]:
    encoder, tokenizer = load(source)
    encoder.set_attn_implementation("sdpa")
    torch.manual_seed(seed)
    head = torch.nn.Linear(encoder.config.hidden_size, 1 + max(r["label"] for r in train))
    fields = TEXTS[options.task]
    dtype = choose_dtype("auto", torch.device("cpu"))
    steps = options.epochs * len(train) // options.batch
    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.01, fused=True)
    order = BatchOrder(len(train), options.batch, seed)

    def logits(rows: list[dict]) -> torch.Tensor:
        batch = tokenizer(
            *([r[f] for r in rows] for f in fields),
            padding=True,
            truncation=True,
            max_length=options.max_length,
            return_tensors="pt",
        )
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            hidden_BLD = encoder(**batch).last_hidden_state
        real_BL1 = batch["attention_mask"][:, :, None]
        return head((hidden_BLD.float() * real_BL1).sum(1) / real_BL1.sum(1))

    encoder.train()
    for step in range(1, steps + 1):
        rows = [train[i] for i in order.indices(step)]
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(step / (0.1 * steps), (steps - step + 1) / (0.9 * steps))
        loss = torch.nn.functional.cross_entropy(logits(rows), torch.tensor([r["label"] for r in rows]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    encoder.eval()
    accuracy = {}
    with torch.no_grad():
        for name, rows in sets.items():
            by_length = sorted(rows, key=lambda r: sum(len(r[f]) for f in fields))
            chunks = [by_length[i : i + 128] for i in range(0, len(by_length), 128)]
            right = sum(int((logits(c).argmax(1) == torch.tensor([r["label"] for r in c])).sum()) for c in chunks)
            accuracy[name] = right / max(1, len(rows))
    return accuracy


if __name__ == "__main__":
    main()
