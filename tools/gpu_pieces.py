"""The measurements of `tools/gpu.py`: tests, benchmarks, distillation, relation kernels, latency.

Each piece is a function that measures something on a `Bench` and returns rows of a table.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from benchmarks.whole_step import kdcli_step, step_flops, teacher_and_student, timed
from kdcli.deploy.environment import installed
from kdcli.deploy.old_machines.measure_encoders import cpu_name
from kdcli.engine.device import TORCH_DTYPES, choose_device, choose_dtype, has_bf16
from kdcli.engine.memory import peak_of
from kdcli.errors import is_out_of_memory, last_message
from kdcli.losses.relation import computed_by, relation_kl, why_no_triton
from kdcli.verbs.distill.student import relation_kernel

Row = tuple[str, str]
"""The name of a measurement and its result."""

RATES: dict[str, dict[str, float]] = {
    "k80": {"fp32": 4.37},
    "p100": {"fp32": 9.3, "fp16": 18.7},
    "p100-sxm2": {"fp32": 10.6, "fp16": 21.2},
    "v100": {"fp32": 15.7, "fp16": 125},
    "t4": {"fp32": 8.1, "fp16": 65},
    "a100": {"fp32": 19.5, "fp16": 312, "bf16": 312},
    "h100": {"fp32": 67, "fp16": 989, "bf16": 989},
    "h200": {"fp32": 67, "fp16": 989, "bf16": 989},
}
"""TFLOP/s of dense matrix products by card and number format, from the vendors' data sheets. They
assume the boost clock and no TF32, which PyTorch does not use by default."""


@dataclass(frozen=True)
class Bench:
    """Settings of all measurements.

    Attributes:
        device: The device to measure.
        tiny: Use small shapes, to test the script.
        folder: Directory for logs and reports.
    """

    device: torch.device
    tiny: bool
    folder: Path

    @property
    def rounds(self) -> int:
        """Number of timed rounds."""
        return 2 if self.tiny else 20

    @property
    def config(self) -> BertConfig:
        """The teacher's configuration, by default BERT-base."""
        small = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
        }
        return BertConfig(**small, vocab_size=500) if self.tiny else BertConfig()

    @property
    def students(self) -> list[str]:
        """Shapes of the students."""
        return ["1x32", "2x32"] if self.tiny else ["6x384", "4x312:1200"]

    def median(self, *calls: Callable[[], object]) -> list[float]:
        """Return the median seconds of each call, from interleaved rounds after two for warm-up."""
        rounds = [[timed(call) for call in calls] for _ in range(self.rounds + 2)][2:]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]


Piece = Callable[[Bench], list[Row]]


def machine(bench: Bench) -> list[Row]:
    """Check that the device works, and return its name and the versions for the table's heading."""
    device = choose_device(str(bench.device))
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    versions = installed(["torch", "triton", "transformers"])
    return [("device", card), *((name, f"{name} {version}") for name, version in versions.items())]


def tests(bench: Bench) -> list[Row]:
    """Run the tests marked `cuda`."""
    where = ["tests/engine/test_cuda.py"] if bench.tiny else ["tests"]
    command = ["-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *where]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return [("tests marked cuda", ran.stdout.strip().splitlines()[-1])]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(.*)", ran.stdout, re.MULTILINE)
    if not failed:
        raise RuntimeError(last_message(ran.stderr or ran.stdout))
    summary = ran.stdout.strip().splitlines()[-1]
    return [*((name, f"failed{why}") for name, why in failed), ("of", summary)]


def script(name: str, *arguments: str, tiny: tuple[str, ...] = ()) -> Piece:
    """Return a piece that runs a script of benchmarks/ and keeps the lines that it prints.

    Args:
        name: The script.
        arguments: Its arguments.
        tiny: Additional arguments for a tiny bench.
    """

    def piece(bench: Bench) -> list[Row]:
        own = [*arguments, *(tiny if bench.tiny else ()), "--device", str(bench.device)]
        command = [sys.executable, f"benchmarks/{name}.py", *own]
        path = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if ran.returncode:
            raise RuntimeError(last_message(ran.stderr))
        what = f"{name} {' '.join(arguments)}".strip()
        return [(what, line) for line in ran.stdout.splitlines() if line]

    return piece


def distillation(student: int, number: str) -> Piece:
    """Return a piece that times steps of MiniLM with the largest batch that fits.

    Rows have 128 tokens, weights are random, and dropout is 0.1. The loss of fp16 is not scaled.

    Args:
        student: Index of the student's shape.
        number: The number format.
    """

    def piece(bench: Bench) -> list[Row]:
        shape, dtype = bench.students[student], dtype_of(number, bench.device)
        for batch in (2,) if bench.tiny else (256, 128, 64, 32, 16):
            try:
                return time_step(bench, shape, number, dtype, batch)
            except RuntimeError as error:
                if not is_out_of_memory(error) or batch == 16:
                    raise
            torch.cuda.empty_cache()
        raise AssertionError(batch)

    return piece


def time_step(bench: Bench, shape: str, number: str, dtype: torch.dtype, batch: int) -> list[Row]:
    """Time a step of MiniLM, and compare its FLOP/s with the card's."""
    kernel, ids_BL = relation_kernel("auto", bench.device, dtype), random_rows(bench, batch)
    step = kdcli_step(
        [shape], dtype, dropout=0.1, device=bench.device, config=bench.config, kernel=kernel
    )
    peak = peak_of(lambda: step(ids_BL), bench.device)
    (seconds,) = bench.median(lambda: step(ids_BL))
    models = teacher_and_student(shape, dropout=0.1, config=bench.config)
    flops_per_second = step_flops(*models, batch) / seconds
    card = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else ""
    rate = card_rate(card, number)
    share = f", {flops_per_second / rate:.1%} of the card's {rate / 1e12:.0f}" if rate else ""
    teacher = f"{bench.config.num_hidden_layers}x{bench.config.hidden_size}"
    what = f"{teacher} to {shape}, {number}, batch {batch}, relations by {kernel}"
    speed = (
        f"{batch * 128 / seconds:,.0f} tokens/s; {flops_per_second / 1e12:.2f} TFLOP/s{share}; "
        f"{size_of(peak)} for a step"
    )
    return [(what, speed)]


def two_students(bench: Bench) -> list[Row]:
    """Time a run with two students, compared with two runs with one student each."""
    dtype, shapes = choose_dtype("auto", bench.device), bench.students
    kernel = relation_kernel("auto", bench.device, dtype)
    steps = [
        kdcli_step(
            each, dtype, dropout=0.1, device=bench.device, config=bench.config, kernel=kernel
        )
        for each in (shapes, shapes[:1], shapes[1:])
    ]
    ids_BL = random_rows(bench, 2 if bench.tiny else 64)
    both, one, other = bench.median(*(lambda step=step: step(ids_BL) for step in steps))
    what = f"{' and '.join(shapes)} of one teacher pass"
    return [(what, f"{both / (one + other):.2f} of the time of two runs")]


def relation(length: int) -> Piece:
    """Return a piece that compares PyTorch and Triton on one attention relation.

    It computes the value and the gradients for BERT-base and a 6x384 student.

    Args:
        length: Number of tokens in a row.
    """

    def piece(bench: Bench) -> list[Row]:
        numbers = numbers_of(bench.device)
        return [row for number in numbers for row in relation_rows(bench, length, number)]

    return piece


def relation_rows(bench: Bench, length: int, number: str) -> list[Row]:
    """Time both kernels of a relation in one number format, and compare their gradients."""
    batch, heads, tokens = (2, 2, 32) if bench.tiny else (max(4, 16384 // length), 12, length)
    dtype, device = TORCH_DTYPES[number], bench.device
    generator = torch.Generator(device).manual_seed(0)
    drawn = [
        torch.randn(batch, heads, tokens, width, device=device, generator=generator).to(dtype)
        for width in (64, 64, 32, 32)
    ]
    mask_BL = torch.ones(batch, tokens, dtype=torch.long, device=device)
    mask_BL[0, tokens // 2 :] = 0
    reason = why_no_triton(device, dtype)
    kernels = ["torch"] if reason else ["torch", "triton"]
    steps = {kernel: relation_step(kernel, drawn, mask_BL) for kernel in kernels}
    peaks = {kernel: size_of(peak_of(step, device)) for kernel, step in steps.items()}
    seconds = dict(zip(steps, bench.median(*steps.values()), strict=True))
    what = f"relation [{batch}, {heads}, {tokens}], {number}"
    rows = [
        (f"{what}, {kernel}", f"{1e3 * seconds[kernel]:.2f} ms, {peaks[kernel]}")
        for kernel in kernels
    ]
    if reason:
        return [*rows, (f"{what}, triton", f"not measured: {reason}")]
    pairs = zip(*(step() for step in steps.values()), strict=True)
    distance = max((a - b).norm() / a.norm() for a, b in pairs)
    ratio = seconds["torch"] / seconds["triton"]
    comparison = f"{ratio:.2f}x; gradients differ by {distance:.0e}"
    return [*rows, (f"{what}, torch over triton", comparison)]


def relation_step(
    kernel: str, drawn: list[torch.Tensor], mask: torch.Tensor
) -> Callable[[], list[torch.Tensor]]:
    """Return a function that computes the gradients of a relation loss with a kernel.

    Args:
        kernel: `torch` or `triton`.
        drawn: x and y of the teacher, then x and y of the student, [B, A, L, K] each.
        mask: The mask of real tokens, [B, L].
    """
    t_x, t_y, *of_student = drawn
    s_x, s_y = (x.detach().clone().requires_grad_() for x in of_student)

    def step() -> list[torch.Tensor]:
        with computed_by(kernel):
            loss = relation_kl(t_x, t_y, s_x, s_y, mask)
        return [gradient.float() for gradient in torch.autograd.grad(loss, [s_x, s_y])]

    return step


def latency(bench: Bench) -> list[Row]:
    """Run `kdcli benchmark` with one sequence of 128 tokens, eager and compiled.

    The first shape is the baseline.
    """
    out = bench.folder / "latency"
    command = [sys.executable, "-m", "kdcli", "benchmark"]
    if bench.tiny:
        command += ["2x64:128@4", "1x64:128@4", "--backend", "torch"]
        command += ["--set", "measure.min_runs=3", "--set", "measure.min_seconds=0.05"]
    else:
        dtype = choose_dtype("auto", bench.device)
        fast = {torch.float32: "", torch.bfloat16: "-bf16", torch.float16: "-fp16"}[dtype]
        backends = dict.fromkeys(["torch", "compile", f"torch{fast}", f"compile{fast}"])
        command += ["12x768", "6x768", "6x384", "4x312:1200"]
        command += [word for backend in backends for word in ("--backend", backend)]
    command += ["--overwrite", "--device", str(bench.device), "-o", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(next(line for line in ran.stderr.splitlines() if "error: " in line))
    rows = []
    for row in json.loads((out / "report.json").read_text("utf-8"))["latency"]:
        shape = f"{row['batch_size']}x{row['seq_len']}"
        what = f"{row['model']}, {row['backend']} {row['dtype']}, {shape}"
        rows.append((what, f"{row['p50_ms']:.2f} ms, p95 {row['p95_ms']:.2f}"))
    return rows


def cuda_graph(bench: Bench) -> list[Row]:
    """Compare a forward pass of 128 tokens as a CUDA graph with the same kernels one by one."""
    if bench.device.type != "cuda":
        return [("CUDA graphs", "not measured: they need a CUDA device")]
    rows, ids_BL = [], random_rows(bench, 1)
    for shape in bench.students:
        _, model = teacher_and_student(shape, dropout=0.0, device=bench.device, config=bench.config)
        model.eval()
        with torch.inference_mode():
            graph = graph_of(model, ids_BL)
            eager, replayed = bench.median(partial(model, ids_BL), graph.replay)
        times = f"eager {1e3 * eager:.2f} ms, CUDA graph {1e3 * replayed:.2f} ms"
        rows.append((f"{shape}, batch 1", times))
    return rows


def graph_of(model: BertModel, ids_BL: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Record a forward pass as a CUDA graph, after three passes for warm-up."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(ids_BL)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(ids_BL)
    return graph


def dtype_of(number: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a number format.

    fp16 is also allowed on a CPU, where steps can be timed in it.
    """
    return TORCH_DTYPES[number] if device.type == "cpu" else choose_dtype(number, device)


def numbers_of(device: torch.device) -> list[str]:
    """Return the number formats of a device."""
    numbers = ["fp32"]
    if device.type == "cuda":
        numbers.append("fp16")
    if has_bf16(device):
        numbers.append("bf16")
    return numbers


def random_rows(bench: Bench, batch: int) -> torch.Tensor:
    """Return a batch of random token ids, [B, 128]."""
    return torch.randint(5, bench.config.vocab_size, (batch, 128), device=bench.device)


def card_rate(name: str, number: str) -> float | None:
    """Return the FLOP/s of matrix products on the vendor's data sheet.

    None for a card that is not in `RATES`, and for a number format that the card does not have.
    """
    known = [card for card in RATES if re.search(rf"\b{card}\b", name.lower())]
    rates = RATES[max(known, key=len)] if known else {}
    return 1e12 * rates[number] if number in rates else None


def size_of(bytes_: int | None) -> str:
    """Return an amount of memory as text."""
    return "memory unknown" if bytes_ is None else f"{bytes_ / 1e6:,.0f} MB"


MACHINE = "machine"
"""Name of the piece that checks the device. It runs first."""
PIECES: dict[str, Piece] = {
    MACHINE: machine,
    "relation-128": relation(128),
    "relation-512": relation(512),
    "relation-1024": relation(1024),
    **{
        f"distil-{student}-{n}": distillation(student, n)
        for student in (0, 1)
        for n in ("bf16", "fp16", "fp32")
    },
    "two-students": two_students,
    "smp-step": script("prune", "step", tiny=("--shape", "2x64", "--batch", "2", "--rounds", "2")),
    "smp-memory": script("prune", "memory", tiny=("--shape", "2x64", "--batch", "2")),
    "whole-step": script("whole_step", tiny=("--rounds", "1")),
    "task-step": script("task_step", tiny=("--rounds", "1", "--steps", "2", "--groups", "8")),
    "cotrain": script(
        "cotrain", tiny=("--rounds", "1", "--batch", "2", "--teacher", "2x64", "--student", "1x64")
    ),
    "vocabulary": script("vocabulary", tiny=("--rounds", "1")),
    "cuda-graph": cuda_graph,
    "latency": latency,
    "tests": tests,
}
