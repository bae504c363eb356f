"""python -m tools.gpu [--minutes 9] [--device cuda] [--only NAME,NAME] [--again] [--tiny] [--out
runs/gpu]

Measures kdcli on a machine with a GPU, in pieces: tests, benchmarks, distillation, relation
kernels, SMP, latency. A call works for `--minutes` and the next goes on with the pieces that are
left; a piece that fails is recorded with its error's last line, `--again` repeats it. Writes
RESULTS.json and RESULTS.md, a table for docs/results.md, and copies both to the directory that the
variable OUT names, if it does.

Needs a torch with CUDA and what pyproject.toml requires, all importable, and the repository as its
working directory; pytest for the tests, triton for the kernels. Nothing is downloaded: weights,
rows and texts are random or embedded. `--device cpu --tiny` runs every piece that needs no GPU, on
small shapes: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from benchmarks.whole_step import kdcli_step, step_flops, teacher_and_student, timed
from kdcli.deploy.environment import installed
from kdcli.deploy.old_machines.measure_encoders import cpu_name
from kdcli.disk import write_atomic
from kdcli.engine.device import TORCH_DTYPES, choose_device, choose_dtype, has_bf16
from kdcli.engine.memory import is_out_of_memory, peak_of
from kdcli.losses.relation import computed_by, relation_kl, why_no_triton
from kdcli.verbs.distill.student import relation_kernel

Row = tuple[str, str]
"""What was measured, and how much."""

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
"""TFLOP/s of dense matrix products by card and number format, from the vendor's data sheets: at the
boost clock, and without TF32, which PyTorch leaves off."""


@dataclass(frozen=True)
class Bench:
    """Where to measure, and how large."""

    device: torch.device
    tiny: bool
    folder: Path

    @property
    def rounds(self) -> int:
        return 2 if self.tiny else 20

    @property
    def config(self) -> BertConfig:
        """The teacher: BERT-base's shape."""
        small = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
        }
        return BertConfig(**small, vocab_size=500) if self.tiny else BertConfig()

    def students(self) -> list[str]:
        return ["1x32", "2x32"] if self.tiny else ["6x384", "4x312:1200"]

    def median(self, *calls: Callable[[], object]) -> list[float]:
        """Seconds of each call, the median of interleaved rounds; two rounds warm up."""
        taken = [[timed(call) for call in calls] for _ in range(self.rounds + 2)][2:]
        return [statistics.median(times) for times in zip(*taken, strict=True)]


def machine(bench: Bench) -> list[Row]:
    """The device, tried, and what the table's heading names."""
    device = choose_device(str(bench.device))
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    found = installed(["torch", "triton", "transformers"])
    return [("device", card), *((name, f"{name} {version}") for name, version in found.items())]


def tests(bench: Bench) -> list[Row]:
    """What is marked `cuda`."""
    where = ["tests/engine/test_cuda.py"] if bench.tiny else ["tests"]
    command = ["-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *where]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return [("tests marked cuda", ran.stdout.strip().splitlines()[-1])]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(.*)", ran.stdout, re.MULTILINE)
    if not failed:
        raise RuntimeError((ran.stderr or ran.stdout).strip().splitlines()[-1])
    return [(name, f"failed{why}") for name, why in failed] + [
        ("of", ran.stdout.strip().splitlines()[-1])
    ]


def script(name: str, *arguments: str, tiny: tuple[str, ...] = ()) -> Callable[[Bench], list[Row]]:
    """A script of benchmarks/: the lines that it prints."""

    def piece(bench: Bench) -> list[Row]:
        given = [*arguments, *(tiny if bench.tiny else ()), "--device", str(bench.device)]
        command = [sys.executable, f"benchmarks/{name}.py", *given]
        path = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": path},
        )
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip().splitlines()[-1])
        return [
            (f"{name} {' '.join(arguments)}".strip(), line)
            for line in ran.stdout.splitlines()
            if line
        ]

    return piece


def distillation(place: int, number: str) -> Callable[[Bench], list[Row]]:
    """Steps of MiniLM: rows of 128 tokens, random weights, dropout 0.1; without the scaling of
    fp16's loss."""

    def piece(bench: Bench) -> list[Row]:
        shape, dtype = bench.students()[place], checked(number, bench.device)
        for batch in (2,) if bench.tiny else (256, 128, 64, 32, 16):
            try:
                return measured(bench, shape, number, dtype, batch)
            except RuntimeError as error:
                if not is_out_of_memory(error) or batch == 16:
                    raise
            torch.cuda.empty_cache()
        raise AssertionError(batch)

    return piece


def measured(bench: Bench, shape: str, number: str, dtype: torch.dtype, batch: int) -> list[Row]:
    how = {"dropout": 0.1, "device": bench.device, "config": bench.config}
    kernel, ids_BL = relation_kernel("auto", bench.device, dtype), rows_of(bench, batch)
    step = kdcli_step([shape], dtype, **how, kernel=kernel)
    peak = peak_of(lambda: step(ids_BL), bench.device)
    (seconds,) = bench.median(lambda: step(ids_BL))
    reached = (
        step_flops(*teacher_and_student(shape, dropout=0.1, config=bench.config), batch) / seconds
    )
    rate = card_rate(bench.device, number)
    share = f", {reached / rate:.1%} of the card's {rate / 1e12:.0f}" if rate else ""
    teacher = f"{bench.config.num_hidden_layers}x{bench.config.hidden_size}"
    what = f"{teacher} to {shape}, {number}, batch {batch}, relations by {kernel}"
    speed = (
        f"{batch * 128 / seconds:,.0f} tokens/s; {reached / 1e12:.2f} TFLOP/s{share}; "
        f"{size_of(peak)} for a step"
    )
    return [(what, speed)]


def two_students(bench: Bench) -> list[Row]:
    dtype, shapes = choose_dtype("auto", bench.device), bench.students()
    how = {"dropout": 0.1, "device": bench.device, "config": bench.config}
    how["kernel"] = relation_kernel("auto", bench.device, dtype)
    steps = [kdcli_step(each, dtype, **how) for each in (shapes, shapes[:1], shapes[1:])]
    ids_BL = rows_of(bench, 2 if bench.tiny else 64)
    both, one, other = bench.median(*(lambda step=step: step(ids_BL) for step in steps))
    return [
        (
            f"{' and '.join(shapes)} of one teacher pass",
            f"{both / (one + other):.2f} of the time of two runs",
        )
    ]


def relation(length: int) -> Callable[[Bench], list[Row]]:
    """Value and gradients of an attention relation of BERT-base and a 6x384 student, PyTorch next
    to Triton."""

    def piece(bench: Bench) -> list[Row]:
        batch, heads, tokens = (2, 2, 32) if bench.tiny else (max(4, 16384 // length), 12, length)
        rows = []
        for number in numbers_of(bench.device):
            dtype, made = TORCH_DTYPES[number], torch.Generator(bench.device).manual_seed(0)
            drawn = [
                torch.randn(batch, heads, tokens, width, device=bench.device, generator=made).to(
                    dtype
                )
                for width in (64, 64, 32, 32)
            ]
            mask = torch.ones(batch, tokens, dtype=torch.long, device=bench.device)
            mask[0, tokens // 2 :] = 0
            reason = why_no_triton(bench.device, dtype)
            kernels = ["torch"] if reason else ["torch", "triton"]
            ways = {kernel: relation_step(kernel, drawn, mask) for kernel in kernels}
            peaks = {kernel: size_of(peak_of(way, bench.device)) for kernel, way in ways.items()}
            seconds = dict(zip(ways, bench.median(*ways.values()), strict=True))
            what = f"relation [{batch}, {heads}, {tokens}], {number}"
            rows += [
                (f"{what}, {kernel}", f"{1e3 * seconds[kernel]:.2f} ms, {peaks[kernel]}")
                for kernel in kernels
            ]
            if reason:
                rows.append((f"{what}, triton", f"not measured: {reason}"))
            else:
                apart = [
                    (a - b).norm() / a.norm()
                    for a, b in zip(*(way() for way in ways.values()), strict=True)
                ]
                ratio = seconds["torch"] / seconds["triton"]
                rows.append(
                    (
                        f"{what}, torch over triton",
                        f"{ratio:.2f}x; gradients differ by {max(apart):.0e}",
                    )
                )
        return rows

    return piece


def relation_step(
    kernel: str, drawn: list[torch.Tensor], mask: torch.Tensor
) -> Callable[[], list[torch.Tensor]]:
    t_x, t_y, *given = drawn
    s_x, s_y = (x.detach().clone().requires_grad_() for x in given)

    def step() -> list[torch.Tensor]:
        with computed_by(kernel):
            loss = relation_kl(t_x, t_y, s_x, s_y, mask)
        return [gradient.float() for gradient in torch.autograd.grad(loss, [s_x, s_y])]

    return step


def latency(bench: Bench) -> list[Row]:
    """`kdcli benchmark`: one sequence of 128 tokens, eager and compiled, the first shape the
    baseline."""
    shapes = (
        ["2x64:128@4", "1x64:128@4"] if bench.tiny else ["12x768", "6x768", "6x384", "4x312:1200"]
    )
    fast = str(choose_dtype("auto", bench.device)).replace("torch.", "")
    fast = {"float32": "", "bfloat16": "-bf16", "float16": "-fp16"}[fast]
    backends = (
        ["torch"]
        if bench.tiny
        else list(dict.fromkeys(["torch", "compile", f"torch{fast}", f"compile{fast}"]))
    )
    few = ["--set", "measure.min_runs=3", "--set", "measure.min_seconds=0.05"] if bench.tiny else []
    out = bench.folder / "latency"
    command = [
        "benchmark",
        *shapes,
        *(part for b in backends for part in ("--backend", b)),
        *few,
        "--overwrite",
    ]
    command = [
        sys.executable,
        "-m",
        "kdcli",
        *command,
        "--device",
        str(bench.device),
        "-o",
        str(out),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(next(line for line in ran.stderr.splitlines() if "error: " in line))
    return [
        (
            f"{row['model']}, {row['backend']} {row['dtype']}, "
            f"{row['batch_size']}x{row['seq_len']}",
            f"{row['p50_ms']:.2f} ms, p95 {row['p95_ms']:.2f}",
        )
        for row in json.loads((out / "report.json").read_text("utf-8"))["latency"]
    ]


def cuda_graph(bench: Bench) -> list[Row]:
    """A forward pass of one sequence of 128 tokens as one recorded CUDA graph next to the same
    kernels one by one."""
    if bench.device.type != "cuda":
        return [("CUDA graphs", "not measured: they need a CUDA device")]
    rows, ids_BL = [], rows_of(bench, 1)
    for shape in bench.students():
        model = teacher_and_student(shape, dropout=0.0, device=bench.device, config=bench.config)[
            1
        ].eval()
        with torch.inference_mode():
            eager, replayed = bench.median(partial(model, ids_BL), recorded(model, ids_BL).replay)
        rows.append(
            (f"{shape}, batch 1", f"eager {1e3 * eager:.2f} ms, CUDA graph {1e3 * replayed:.2f} ms")
        )
    return rows


def recorded(model: BertModel, ids_BL: torch.Tensor) -> torch.cuda.CUDAGraph:
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


def checked(number: str, device: torch.device) -> torch.dtype:
    """The dtype; on a CPU fp16 too, which steps can be timed in."""
    return TORCH_DTYPES[number] if device.type == "cpu" else choose_dtype(number, device)


def numbers_of(device: torch.device) -> list[str]:
    return [
        "fp32",
        *(["fp16"] if device.type == "cuda" else []),
        *(["bf16"] if has_bf16(device) else []),
    ]


def rows_of(bench: Bench, batch: int) -> torch.Tensor:
    return torch.randint(5, bench.config.vocab_size, (batch, 128), device=bench.device)


def card_rate(device: torch.device, number: str) -> float | None:
    """FLOP/s of matrix products by the vendor's data sheet; None for a card that is not in
    `RATES`."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    known = [card for card in RATES if re.search(rf"\b{card}\b", name)]
    rates = RATES[max(known, key=len)] if known else {}
    return 1e12 * rates[number] if number in rates else None


def size_of(bytes_: int | None) -> str:
    return "memory unknown" if bytes_ is None else f"{bytes_ / 1e6:,.0f} MB"


MACHINE = "machine"
PIECES: dict[str, Callable[[Bench], list[Row]]] = {
    MACHINE: machine,
    "relation-128": relation(128),
    "relation-512": relation(512),
    "relation-1024": relation(1024),
    **{
        f"distil-{place}-{n}": distillation(place, n)
        for place in (0, 1)
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


class Record:
    """Results so far of one device and size, whole on the disk after every piece."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / f"{name}.json"
        self.pieces: dict[str, Any] = (
            json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        )

    def add(self, name: str, found: dict[str, Any]) -> None:
        self.pieces[name] = found
        write_atomic(self.file, json.dumps(self.pieces, indent=1))
        write_atomic(self.file.with_suffix(".md"), self.table())

    def table(self) -> str:
        lines = [", ".join(value for _, value in self.pieces[MACHINE]["rows"]) + ":", ""]
        lines += ["| piece | measured | |", "|---|---|---|"]
        for name, found in self.pieces.items():
            rows = found["rows"] or [("failed", found["error"])]
            cells = [[name, what, value] for what, value in rows if name != MACHINE]
            lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]
        return "\n".join(lines) + "\n"


def run(names: list[str], record: Record, bench: Bench, minutes: float) -> list[str]:
    """Run pieces one after the other, each in a process of its own; the names of those left for the
    next call."""
    end, left = time.monotonic() + 60 * minutes, list(names)
    for number, name in enumerate(names):
        began = time.monotonic()
        found = alone(name, bench, end - began)
        if found is None and number:
            break  # It had a part of the time; first in the next call, it has all of it.
        found = found or {"rows": [], "error": f"it takes more than {minutes:g} minutes"}
        if name == MACHINE and found["error"]:
            raise SystemExit(f"error: {found['error']}")
        record.add(name, found | {"seconds": round(time.monotonic() - began, 1)})
        left.remove(name)
        print(
            f"{name}: {found['error'] or 'done'} ({record.pieces[name]['seconds']} s)", flush=True
        )
    return left


def alone(name: str, bench: Bench, seconds: float) -> dict[str, Any] | None:
    """Rows of a piece, or the last line of its log as its error; None if it is not done in time."""
    # A fork has torch loaded already; this process never uses the device, whose state no fork may
    # inherit.
    context, log = multiprocessing.get_context("fork"), bench.folder / f"{name}.log"
    read, write = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(PIECES[name], bench, log, write))
    child.start()
    assert child.pid is not None
    write.close()
    try:
        return {"rows": read.recv(), "error": None} if read.poll(max(0.0, seconds)) else None
    except EOFError:
        child.join()
        said = [
            line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()
        ]
        return {
            "rows": [],
            "error": said[-1] if said else f"its process ended with {child.exitcode}",
        }
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # It may not lead a group yet.
        child.join()


def _answer(piece: Callable[[Bench], list[Row]], bench: Bench, log: Path, write: Any) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stderr.fileno(), stream)
    write.send(piece(bench))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help=f"of {', '.join(PIECES)}; with commas between")
    parser.add_argument("--again", action="store_true", help="repeat what failed")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args()
    names = [MACHINE, *given.only.split(",")] if given.only else list(PIECES)
    if unknown := set(names) - set(PIECES):
        parser.error(f"unknown pieces {', '.join(sorted(unknown))}; known: {', '.join(PIECES)}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given.device):
        parser.error(f"unknown device {given.device}; allowed: cpu, cuda, cuda:INDEX")
    record = Record(given.out, f"{given.device.replace(':', '-')}{'-tiny' * given.tiny}")
    due = [
        n for n in names if n not in record.pieces or (given.again and record.pieces[n]["error"])
    ]
    left = run(due, record, Bench(torch.device(given.device), given.tiny, given.out), given.minutes)
    if os.environ.get("OUT"):
        for file in (record.file, record.file.with_suffix(".md")):
            shutil.copy(file, os.environ["OUT"])
    print(
        f"{record.file.with_suffix('.md')}; left for the next call: {', '.join(left) or 'nothing'}"
    )
    return any(record.pieces[name]["error"] for name in names if name in record.pieces)


if __name__ == "__main__":
    # A piece is in a group of its own, and must not outlive this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
