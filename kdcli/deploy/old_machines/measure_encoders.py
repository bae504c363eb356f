"""Measure the latency of BERT-shaped encoders with random weights, even with torch 1.8.

    python measure_encoders.py [--device auto|cpu|cuda|cuda:1] [--out result.json]
                               [--padding random] [--half]

This file needs only Python 3.7 and torch 1.8 or newer. `kdcli benchmark --portable DIR` writes it
next to shapes.json, which lists encoders and cells (batch size, tokens). kdcli's latency worker
imports its statistics.

The model is BERT without pooler and dropout. Attention is eager, so that every version of torch
runs the same operations.

All encoders run in turns, in a new random order in each round, so that other load on the machine
affects all of them equally. A speed-up over the first encoder is the median of the ratios within
each round, with quartiles. A cell in which an encoder is unstable is measured again, up to three
times in all. If it stays unstable, the `low` of `speedup` counts. Ctrl-C keeps the finished cells.
Exit codes: 0 done, 2 wrong usage, 3 this machine cannot run it, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

Key = TypeVar("Key")
SCHEMA = 2
WARM_RUNS, WARM_SECONDS = 10, 1.0
OK, NOISY, UNSTABLE = "ok", "noisy", "unstable"
MAX_SPREAD = {OK: 0.10, NOISY: 0.25}
"""Maximum ratio of interquartile range to median for status ok and noisy; above, it is unstable."""
MIN_FASTEST = 0.5
"""Minimum ratio of the fastest run to the median; below, other work slowed most runs."""
MAX_RANGE = 0.5
"""Maximum ratio of the range of the middle 80 % to the median; above, it is unstable.

Normally distributed times with an interquartile range of 25 % have a range of 47 %. Times with two
modes may have close quartiles, and still a range of several medians."""
MAX_MEASUREMENTS, MAX_SECONDS = 3, 60.0
"""Maximum number of measurements of an unstable cell, and of the seconds that a repeated one takes.
A measurement that took longer is not repeated."""
FEW_RUNS = 5
"""With fewer runs, a time is unstable whatever its spread."""
RUNS_OF_P99 = 100
"""With fewer runs, the 99th percentile would depend on one or two of them."""
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "ALLOC_FAILED",
    "bad_alloc",
)
"""Texts in torch's messages, across versions and devices, when memory runs out."""


class Shape(NamedTuple):
    """The sizes of an encoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int


class Layer(nn.Module):
    """One BERT layer, with a LayerNorm after each of its two halves."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden
        self.heads = shape.heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.mixed = nn.Linear(width, width)
        self.mixed_norm = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, shape.ffn)
        self.down = nn.Linear(shape.ffn, width)
        self.down_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x_BLD: Tensor, mask_B11L: Tensor | None) -> Tensor:
        q_BALK, k_BALK, v_BALK = (
            part(x_BLD).view(x_BLD.size(0), x_BLD.size(1), self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores_BALL = torch.matmul(q_BALK, k_BALK.transpose(2, 3)) * q_BALK.size(-1) ** -0.5
        if mask_B11L is not None:
            scores_BALL = scores_BALL + mask_B11L
        mixed_BALK = torch.matmul(nn.functional.softmax(scores_BALL, dim=-1), v_BALK)
        x_BLD = self.mixed_norm(self.mixed(mixed_BALK.transpose(1, 2).reshape(x_BLD.shape)) + x_BLD)
        out_BLD: Tensor = self.down_norm(self.down(nn.functional.gelu(self.up(x_BLD))) + x_BLD)
        return out_BLD


class Encoder(nn.Module):
    """BERT without pooler and dropout, with random weights."""

    def __init__(self, shape: Shape, vocab_size: int, positions: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, shape.hidden)
        self.positions = nn.Embedding(positions, shape.hidden)
        self.types = nn.Embedding(2, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, eps=1e-12)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        for tensor in self.parameters():
            if tensor.dim() > 1:
                nn.init.normal_(tensor, std=0.02)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        """Compute the last hidden states [B, L, D] of token ids.

        `mask_BL` is 1 at tokens and 0 at padding, or None if there is no padding.
        """
        positions_L = torch.arange(ids_BL.size(1), device=ids_BL.device)
        x_BLD: Tensor = self.norm(
            self.words(ids_BL) + self.types(torch.zeros_like(ids_BL)) + self.positions(positions_L)
        )
        mask_B11L = None
        if mask_BL is not None:
            mask_B11L = (1 - mask_BL[:, None, None, :].to(x_BLD.dtype)) * torch.finfo(
                x_BLD.dtype
            ).min
        for layer in self.layers:
            x_BLD = layer(x_BLD, mask_B11L)
        return x_BLD


def inputs(
    cell: Sequence[int], vocab_size: int, padding: str, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return token ids [B, L] without special tokens, and a mask for `random` padding.

    The mask's first row has the full length.
    """
    batch_size, seq_len = cell
    drawn = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(
        vocab_size // 4, vocab_size - vocab_size // 4, (batch_size, seq_len), generator=drawn
    )
    if padding == "full":
        return ids_BL.to(device), None
    lengths_B = torch.randint(1, seq_len + 1, (batch_size,), generator=drawn)
    lengths_B[0] = seq_len
    mask_BL = (torch.arange(seq_len)[None, :] < lengths_B[:, None]).long()
    return ids_BL.to(device), mask_BL.to(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def attempt(call: Callable[[], object], device: torch.device) -> float | None:
    """Return the seconds that a call takes, or None if memory runs out."""
    try:
        return timed(call, device)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(
            text in str(error) for text in OUT_OF_MEMORY
        ):
            raise
    # The traceback releases its tensors only after the handler.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def warm(call: Callable[[], object], device: torch.device) -> bool:
    """Run a call at least `WARM_RUNS` times and for at least `WARM_SECONDS`.

    Returns False if it does not fit into memory.
    """
    began, runs = time.perf_counter(), 0
    while runs < WARM_RUNS or time.perf_counter() - began < WARM_SECONDS:
        if attempt(call, device) is None:
            return False
        runs += 1
    return True


def interleaved(
    calls: Mapping[Key, Callable[[], object]],
    device: torch.device,
    min_runs: int,
    min_seconds: float,
    is_warm: bool = False,
) -> dict[Key, list[float]]:
    """Run all subjects in rounds, and return the seconds of every run by subject.

    Run i of each subject belongs to round i. Unless they are warm, each subject first warms up
    alone. Rounds continue until there are at least `min_runs` rounds and they took at least
    `min_seconds`. Subjects that run out of memory are dropped.
    """
    drawn = torch.Generator().manual_seed(0)
    collecting = gc.isenabled()
    with getattr(torch, "inference_mode", torch.no_grad)():
        times: dict[Key, list[float]] = {
            key: [] for key in calls if is_warm or warm(calls[key], device)
        }
        gc.collect()
        gc.disable()
        try:
            began, rounds = time.perf_counter(), 0
            while times and (rounds < min_runs or time.perf_counter() - began < min_seconds):
                keys = list(times)
                for key in [keys[i] for i in torch.randperm(len(keys), generator=drawn).tolist()]:
                    seconds = attempt(calls[key], device)
                    if seconds is None:
                        del times[key]
                    else:
                        times[key].append(seconds)
                rounds += 1
        finally:
            if collecting:
                gc.enable()
    return times


def measure(
    calls: Mapping[Key, Callable[[], object]],
    device: torch.device,
    min_runs: int,
    min_seconds: float,
    max_measurements: int = MAX_MEASUREMENTS,
) -> dict[Key, list[float]]:
    """Run `interleaved`, and run it again while the times of a subject are unstable.

    There are at most `max_measurements`. Each takes twice as long as the one before, but at most
    `MAX_SECONDS`. A measurement that already took `MAX_SECONDS` is not repeated. The result is the
    measurement with the fewest unstable subjects, and of equal ones the last.
    """
    kept = times = interleaved(calls, device, min_runs, min_seconds)
    for _ in range(max_measurements - 1):
        took = sum(sum(seconds) for seconds in times.values())
        if not unstable(times) or took >= MAX_SECONDS:
            break
        longer = min(2 * took, MAX_SECONDS)
        fitting = {key: calls[key] for key in kept}
        times = interleaved(fitting, device, min_runs, longer, is_warm=True)
        if len(times) == len(kept) and len(unstable(times)) <= len(unstable(kept)):
            kept = times
    return kept


def unstable(times: Mapping[Key, Sequence[float]]) -> list[Key]:
    """Return the subjects whose times are unstable."""
    return [key for key, seconds in times.items() if summary(seconds)["status"] == UNSTABLE]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` per cent lie, interpolated linearly."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ends(times: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of some times."""
    return percentile(times, 10), percentile(times, 90)


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the columns of a row that describe the times of a cell.

    Without times, the cell did not fit into memory.
    """
    names = ("p50_ms", "p75_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms", "iqr_over_p50")
    if not seconds:
        return {"n": 0, **dict.fromkeys(names), "status": "out of memory"}
    ms = sorted(s * 1e3 for s in seconds)
    p25, p50, p75, p95, p99 = (percentile(ms, share) for share in (25, 50, 75, 95, 99))
    p10, p90 = ends(ms)
    spread, mean = (p75 - p25) / p50, sum(ms) / len(ms)
    values = (p50, p75, p90, p95, p99 if len(ms) >= RUNS_OF_P99 else None, mean, spread)
    status = next((name for name, most in MAX_SPREAD.items() if spread <= most), UNSTABLE)
    is_wide = (p90 - p10) / p50 > MAX_RANGE or ms[0] < MIN_FASTEST * p50
    if len(ms) < FEW_RUNS or is_wide:
        status = UNSTABLE
    return {"n": len(ms), **{name: values[i] for i, name in enumerate(names)}, "status": status}


def speedup(baseline: Sequence[float], candidate: Sequence[float]) -> dict[str, Any]:
    """Return the median and quartiles of the ratios within each round, and whether to trust them.

    A speed-up is unstable if the times of either side are. `low` is then at most the ratio of the
    baseline's fastest run to the candidate's 90th percentile: other work on the machine may slow
    most runs of one side alone.
    """
    ratios = [seconds / candidate[i] for i, seconds in enumerate(baseline)]
    low = percentile(ratios, 25)
    is_unstable = bool(unstable({"baseline": baseline, "candidate": candidate}))
    if is_unstable:
        # The ratios of a few rounds may agree by chance.
        low = min(low, min(baseline) / ends(candidate)[1])
    return {
        "median": percentile(ratios, 50),
        "low": low,
        "high": percentile(ratios, 75),
        "unstable": is_unstable,
    }


def stop(code: int, message: str) -> NoReturn:
    """Exit with a message on stderr."""
    print(f"measure_encoders.py: {message}", file=sys.stderr)
    raise SystemExit(code)


def driver() -> str | None:
    """Return the version of the NVIDIA driver according to nvidia-smi, or None."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def choose_device(wanted: str, install: Mapping[str, str]) -> torch.device:
    """Choose a device and run a small kernel on it.

    `install` maps a compute capability to the pip command that fits it.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,3}))?", wanted)
    if not match:
        stop(2, f"unknown device '{wanted}'; allowed: auto, cpu, cuda, cuda:INDEX")
    built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}; driver {driver()}"
    if wanted == "cpu" or not torch.cuda.is_available():
        if wanted.startswith("cuda"):
            stop(
                3,
                f"no CUDA device here ({built}); install a torch that fits the driver, or use "
                "--device cpu",
            )
        if wanted == "auto" and driver():
            print(
                f"measuring on the CPU: {built} sees no CUDA device; check the driver version",
                file=sys.stderr,
            )
        return torch.device("cpu")
    index = int(match[1] or 0)
    if index >= torch.cuda.device_count():
        stop(3, f"the last CUDA device here is cuda:{torch.cuda.device_count() - 1}")
    device, arch_list = torch.device("cuda", index), torch.cuda.get_arch_list()
    major, minor = torch.cuda.get_device_capability(device)
    try:
        torch.ones(8, 8, device=device).mm(torch.ones(8, 8, device=device)).sum().item()
    except RuntimeError as error:
        known = [
            line
            for card, line in install.items()
            if tuple(map(int, card.split("."))) <= (major, minor)
        ]
        stop(
            3,
            f"{built} cannot run on {torch.cuda.get_device_name(device)} (compute capability "
            f"{major}.{minor}; this torch has {', '.join(arch_list)}): "
            f"{str(error).splitlines()[0]}\nrun nvidia-smi to check the card; install a torch with "
            f"kernels for it: {(known or ['an older one'])[-1]}; or use --device cpu",
        )
    return device


def physical_cores() -> int:
    """Return the number of physical cores, limited to the cores that this process may use."""
    siblings = [
        p.read_text()
        for p in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    ]
    cores = len(set(siblings)) or os.cpu_count() or 1
    return min(cores, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else cores


def cpu_name() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    name = (
        re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if info.is_file()
        else None
    )
    return name[1] if name else platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, Any]:
    """Describe the hardware and software, without anything that identifies a person or a host."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return {
        "cpu": cpu_name(),
        "physical_cores": physical_cores(),
        "logical_cores": os.cpu_count() or 1,
        "latency_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "arch_list": torch.cuda.get_arch_list(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def read_plan(path: Path) -> dict[str, Any]:
    """Read shapes.json, and check its shapes, cells and vocabulary: integers of at least 1."""
    try:
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if plan["schema"] != SCHEMA:
            stop(2, f"{path} has schema {plan['schema']}; this file reads {SCHEMA}")
        plan["shapes"] = {name: Shape(**sizes) for name, sizes in plan["shapes"].items()}
        plan["cells"] = list(
            dict.fromkeys((batch_size, seq_len) for batch_size, seq_len in plan["cells"])
        )
        numbers = [
            n
            for group in (*plan["shapes"].values(), *plan["cells"], [plan["vocab_size"]])
            for n in group
        ]
        if (
            not plan["shapes"]
            or not plan["cells"]
            or not all(isinstance(n, int) and n >= 1 for n in numbers)
        ):
            stop(
                2,
                f"{path} needs at least one shape and one cell, and every number must be a whole "
                "number of at least 1",
            )
        if any(shape.hidden % shape.heads for shape in plan["shapes"].values()):
            stop(2, f"{path}: heads must divide the hidden width")
        return plan
    except OSError as error:
        stop(2, f"{error}; shapes.json belongs next to this file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        stop(2, f"{path} cannot be used: {error!r}")


def build(
    plan: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> dict[str, Encoder | None]:
    """Build the encoders with a fixed seed; an encoder that does not fit into memory is None."""
    positions = max(512, *(seq_len for _, seq_len in plan["cells"]))
    encoders: dict[str, Encoder | None] = dict.fromkeys(plan["shapes"])

    def place(name: str, shape: Shape) -> None:
        torch.manual_seed(0)
        encoders[name] = (
            Encoder(shape, plan["vocab_size"], positions).eval().to(device=device, dtype=dtype)
        )

    for name, shape in plan["shapes"].items():
        attempt(functools.partial(place, name, shape), device)
    return encoders


def measure_cell(
    settings: Mapping[str, Any], encoders: Mapping[str, Encoder | None], cell: Sequence[int]
) -> list[dict[str, Any]]:
    """Measure all encoders in one cell; every row after the first has a speed-up over the first."""
    device, size = torch.device(settings["device"]), {"batch_size": cell[0], "seq_len": cell[1]}
    arguments = inputs(cell, settings["vocab_size"], settings["padding"], device)
    calls = {
        name: functools.partial(encoder, *arguments)
        for name, encoder in encoders.items()
        if encoder is not None
    }
    times = measure(calls, device, settings["min_runs"], settings["min_seconds"])
    shared = {
        "backend": "portable",
        **{key: settings[key] for key in ("device", "dtype", "padding")},
        **size,
    }
    rows, baseline = [], next(iter(encoders))
    for name in encoders:
        ratios = None
        if name != baseline and name in times and baseline in times:
            ratios = {"baseline": baseline, **speedup(times[baseline], times[name])}
        rows.append({"model": name, **shared, **summary(times.get(name, ())), "speedup": ratios})
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of a cell."""
    for row in rows:
        took = ""
        if row["p50_ms"] is not None:
            stated = row["p90_ms" if row["status"] == UNSTABLE else "p50_ms"]
            took = f"{stated:10.3f} ms, 95 %: {row['p95_ms']:10.3f} ms"
        print(
            f"{row['model']:>24} {row['batch_size']:>4} x {row['seq_len']:<5} "
            f"{row['status']:<14}{took}"
        )
        if row["speedup"] is not None:
            ratio = row["speedup"]
            over, trust = f"over {ratio['baseline']}: ", "unstable measurement"
            if ratio["unstable"] and ratio["low"] < 1:
                over += "no speed-up"
            elif ratio["unstable"]:
                over += f"at least {ratio['low']:.2f}"
            else:
                over += f"{ratio['median']:.2f}"
                trust = f"quartiles {ratio['low']:.2f} and {ratio['high']:.2f}"
            print(f"{over:>50}, {trust}")
    sys.stdout.flush()


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(result, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        stop(3, f"{path} could not be written: {error}")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Measure the latency of the encoders in shapes.json with plain torch."
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:INDEX")
    parser.add_argument(
        "--out", type=Path, default=Path("result.json"), help="result file; must not exist"
    )
    parser.add_argument(
        "--min-runs", type=int, default=50, help="minimum number of runs per encoder and cell"
    )
    parser.add_argument(
        "--min-seconds", type=float, default=5.0, help="minimum number of seconds per cell"
    )
    parser.add_argument(
        "--padding",
        choices=("full", "random"),
        default="full",
        help="random: rows of mixed lengths with a mask",
    )
    parser.add_argument("--half", action="store_true", help="float16, on CUDA devices only")
    args = parser.parse_args()
    if args.min_runs < 1 or not 0 <= args.min_seconds < 1e6:
        stop(2, "--min-runs must be at least 1 and --min-seconds between 0 and a million")
    if args.out.exists() or not args.out.parent.is_dir():
        stop(2, f"{args.out} exists, or its folder does not; choose another file with --out")
    return args


def main() -> None:
    """Measure cell by cell, and write the result after each cell."""
    args, here = options(), Path(__file__).resolve()
    plan = read_plan(here.with_name("shapes.json"))
    device = choose_device(args.device, plan.get("install", {}))
    if args.half and device.type != "cuda":
        stop(2, "--half needs a CUDA device")
    torch.set_num_threads(physical_cores())
    # TF32 is on by default in some versions, but float32 must mean the same everywhere.
    if torch.backends.cuda.matmul.allow_tf32:
        torch.backends.cuda.matmul.allow_tf32 = False
    dtype = torch.float16 if args.half else torch.float32
    files = (here, here.with_name("shapes.json"))
    settings = {
        "device": str(device),
        "dtype": "fp16" if args.half else "fp32",
        "padding": args.padding,
        "min_runs": args.min_runs,
        "min_seconds": args.min_seconds,
        "vocab_size": plan["vocab_size"],
        "cells": plan["cells"],
    }
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "kdcli portable latency",
        "complete": False,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
        "settings": settings,
        "environment": environment(device),
        "models": {name: shape._asdict() for name, shape in plan["shapes"].items()},
        "rows": [],
    }
    # A batch system ends a job with SIGTERM, which is treated as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        encoders = build(plan, dtype, device)
        for cell in plan["cells"]:
            rows = measure_cell(settings, encoders, cell)
            result["rows"] += rows
            result["complete"] = cell is plan["cells"][-1]
            write(args.out, result)
            show(rows)
    except KeyboardInterrupt:
        if not result["rows"]:
            stop(130, "interrupted before the first cell was finished; nothing was written")
        write(args.out, result)
        stop(130, f"interrupted; {args.out} holds the finished cells")


if __name__ == "__main__":
    main()
