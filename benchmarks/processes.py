"""Compare two processes with one thread each with one process with two threads.

    python benchmarks/processes.py [--rounds 5] [--steps 5]

Both use the same two cores and the same global batch. The engine trains a 6x384 student of a 12x768
teacher with MiniLM, a batch of 16 x 128 tokens, no dropout, and one micro-batch per process. The
two ways take turns. Prints the median seconds of a step without the first one, and the median of
the paired ratios.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys

import numpy as np
import torch
from transformers import BertConfig, BertModel

from kdcli.data.batches import BatchOrder
from kdcli.engine.device import choose_dtype
from kdcli.engine.session import Session, start
from kdcli.engine.train import train
from kdcli.losses import build_objective
from kdcli.models.grammar import parse_shape
from kdcli.models.shape import build_student, shape_of
from kdcli.targets.targets import Teacher
from kdcli.types import Batch, Job, Schedule, Start, StepLoss
from kdcli.verbs.distill.student import Student, freeze_unreached

BATCH, LENGTH, CPU = 16, 128, torch.device("cpu")


class Text:
    """Rows of random tokens."""

    ids = torch.from_numpy(np.random.default_rng(0).integers(1000, 30000, (256, LENGTH)))

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: np.ndarray) -> Batch:
        return {"input_ids": self.ids[torch.from_numpy(indices)]}


def work(steps: int) -> None:
    """Print the median seconds of a step, in the main process."""
    session = Session(start(CPU, choose_dtype("auto", CPU)), CPU)
    torch.manual_seed(0)
    teacher = BertModel(BertConfig(), add_pooling_layer=False)
    shape = parse_shape("6x384", shape_of(teacher.config))
    objective = build_objective("minilm", {}, shape_of(teacher.config), shape)
    student = Student(build_student(teacher, shape, Start(dropout=0.0)).model, objective)
    students = {"6x384": student}
    freeze_unreached(students, teacher, Text().batch(np.arange(1)))
    frozen = Teacher.frozen("teacher", teacher, objective.teacher_needs, session)

    def step(batch: Batch) -> StepLoss:
        return StepLoss(student(batch, frozen.signals(batch)))

    job = Job(students, step, Text(), BatchOrder(256, BATCH, 0), None)
    schedule = Schedule(
        steps=steps + 1, batch_size=BATCH, lr=1e-4, warmup_steps=0, eval_every=10**6
    )
    outcome = train(session, job, schedule, None)
    if session.is_main:
        print(statistics.median(outcome.step_seconds[1:]))


def seconds(processes: int, steps: int) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {
        "OMP_NUM_THREADS": str(2 // processes),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GOMP_SPINCOUNT": "10000",
    }
    common |= {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "ACCELERATE_USE_CPU": "true",
    }
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if processes > 1 else {}
    command = [sys.executable, __file__, "--worker", "--steps", str(steps)]
    started = [
        subprocess.Popen(
            command,
            env=common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    return float(outputs[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.steps)
        return
    pairs = [(seconds(1, options.steps), seconds(2, options.steps)) for _ in range(options.rounds)]
    for name, values in zip(
        ("one process of two threads", "two processes of one"),
        zip(*pairs, strict=True),
        strict=True,
    ):
        print(f"{name:28} {statistics.median(values):.3f} s a step")
    ratios = [two / one for one, two in pairs]
    among = f"({min(ratios):.2f}-{max(ratios):.2f}), load {os.getloadavg()[0]:.1f}"
    print(f"two take {statistics.median(ratios):.2f}x the time {among}")


if __name__ == "__main__":
    main()
