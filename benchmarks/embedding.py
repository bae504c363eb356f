"""Compare embedding distillation and encoding with sentence-transformers.

    python benchmarks/embedding.py MODEL TEXTS [--rows 2048] [--rounds 3] [--threads 1]
                                   [--dtype bf16]

MODEL is an encoder, and TEXTS is a source that `--data` accepts. Both libraries train the same
student (three of six layers) on the same sentences for an epoch, in batches of 64, with the squared
error to the teacher's vectors. The vectors are computed beforehand for both. The commands are
`kdcli distill --method embedding --set loss.vectors=mse` and `SentenceTransformerTrainer` with
`MSELoss`. The rounds are interleaved, and neither library saves, evaluates or logs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MSELoss

from kdcli.data.batches import BucketOrder
from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.text.sentences import read_texts
from kdcli.engine.session import Session, start
from kdcli.engine.train import train
from kdcli.losses import build_objective
from kdcli.models.embedding_format import Pool, save_embedder
from kdcli.models.grammar import parse_shape
from kdcli.models.shape import build_student, shape_of
from kdcli.types import Batch, Job, Schedule, Signals, Start, StepLoss
from kdcli.verbs.distill.student import Student
from kdcli.workloads.embedder import Embedder

BATCH, GROUP, LENGTH = 64, 16, 128


class Rows:
    """Tokenised rows with their target vectors, in the form that `kdcli distill` reads."""

    def __init__(self, rows: TokenizedRows, targets_NE: np.ndarray) -> None:
        self.rows, self.targets = rows, torch.from_numpy(targets_NE)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: np.ndarray) -> Batch:
        return self.rows.batch(indices) | {"target": self.targets[torch.from_numpy(indices)]}


def ours(teacher: Embedder, rows: Rows, session: Session, folder: Path) -> float:
    """Return the seconds of an epoch of kdcli's engine."""
    shape = shape_of(teacher.model.config)
    to = parse_shape(f"{shape.layers // 2}x{shape.hidden}", shape)
    built = build_student(teacher.model.base_model, to, Start(dropout=0.0)).model
    objective = build_objective("embedding", {"vectors": "mse"}, shape, to)
    student = Student(built, objective, Pool(teacher.format))
    order = BucketOrder(rows.rows.lengths, BATCH, GROUP, 0)

    def step(batch: Batch) -> StepLoss:
        signals = Signals(pooled=batch.pop("target"), mask=batch["attention_mask"])
        return StepLoss(student(batch, signals))

    job = Job({"student": student}, step, rows, order, None)
    schedule = Schedule(
        steps=order.steps_of_pass,
        batch_size=BATCH,
        lr=5e-4,
        warmup_steps=5,
        micro_batch_size=GROUP,
        log_every=10**6,
        eval_every=10**6,
        checkpoint_every=10**6,
    )
    began = time.perf_counter()
    train(session, job, schedule, None)
    return time.perf_counter() - began


def theirs(
    teacher: Embedder, texts: list[str], targets_NE: np.ndarray, dtype: str, folder: Path
) -> float:
    """Return the seconds of an epoch of sentence-transformers' trainer."""
    shape = shape_of(teacher.model.config)
    to = parse_shape(f"{shape.layers // 2}x{shape.hidden}", shape)
    save_embedder(
        build_student(teacher.model.base_model, to).model,
        teacher.tokenizer,
        teacher.format,
        folder / "start",
    )
    model = SentenceTransformer(str(folder / "start"), device="cpu")
    model.max_seq_length = LENGTH
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    data = Dataset.from_dict({"sentence": texts, "label": targets_NE.tolist()})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "theirs"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=5e-4,
        warmup_steps=5,
        bf16=dtype == "bf16",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=MSELoss(model)
    )
    began = time.perf_counter()
    trainer.train()
    return time.perf_counter() - began


def ratio(name: str, ours: list[float], theirs: list[float]) -> str:
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    times = f"{statistics.median(ours):.1f} s | {statistics.median(theirs):.1f} s"
    return (
        f"| {name} | {times} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    device, dtype = (
        torch.device("cpu"),
        {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype],
    )
    session = Session(start(device, dtype), device)
    plain = Session(session.accelerator, device, judging=True)
    teacher = Embedder.open(options.model, pooling="mean")
    read = read_texts(options.texts, column=None, unit="sentence", rows=options.rows)
    rows = teacher.tokenize(read.texts, read.roles, LENGTH)
    encode: dict[str, list[float]] = {"ours": [], "theirs": []}
    epochs: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_embedder(teacher.model, teacher.tokenizer, teacher.format, folder / "teacher")
        model = SentenceTransformer(str(folder / "teacher"), device="cpu")
        for _ in range(options.rounds):
            began = time.perf_counter()
            targets_NE = teacher.vectors(read.texts, "", plain)
            encode["ours"].append(time.perf_counter() - began)
            began = time.perf_counter()
            model.encode(read.texts, batch_size=32)
            encode["theirs"].append(time.perf_counter() - began)
            epochs["ours"].append(ours(teacher, Rows(rows, targets_NE), session, folder))
            epochs["theirs"].append(theirs(teacher, read.texts, targets_NE, options.dtype, folder))
    print(
        f"{options.rows} sentences of {rows.lengths.mean():.0f} tokens, {options.threads} threads, "
        f"{options.rounds} rounds\n"
    )
    print("| | kdcli | sentence-transformers | ratio (least-most) |\n|---|---|---|---|")
    print(ratio(f"an epoch, {options.dtype}", epochs["ours"], epochs["theirs"]))
    print(ratio("encoding, fp32", encode["ours"], encode["theirs"]))


if __name__ == "__main__":
    main()
