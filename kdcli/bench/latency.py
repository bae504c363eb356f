"""Latency of several models, measured interleaved in one worker process.

Run one after the other, the same pair of models has given speed-ups between 2.6x and 23x on a shared machine; taken in
turns the drift hits all alike. A speed-up is the median of the ratios within each round, with the quartiles beside it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kdcli.bench.environment import latency_threads
from kdcli.errors import MachineError

CELLS = ((1, 128), (8, 128))
"""(batch size, tokens) every report measures."""


@dataclass(frozen=True)
class Latency:
    """`rows` and `speedups` as they stand in report.json."""

    rows: list[dict[str, Any]]
    speedups: dict[str, dict[str, Any]]


def measure_latency(
    models: Sequence[tuple[str, str]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    min_runs: int,
    min_seconds: float,
    cells: Sequence[tuple[int, int]] = CELLS,
    trust_remote_code: bool = False,
) -> Latency:
    """Measure base encoders on full-length inputs.

    Args:
        models: (name, directory or hub id); the first is the baseline of every speed-up.
        device, dtype: where and in what the forward pass runs.
        min_runs, min_seconds: every cell goes on until each model ran so often and all together ran so long.
        cells: (batch size, tokens).
        trust_remote_code: passed on to loading.

    Raises:
        MachineError: the worker died; its last line, or the signal that ended it, is given.
    """
    request = {
        "models": list(models),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "cells": list(cells),
        "threads": latency_threads(),
        "min_runs": min_runs,
        "min_seconds": min_seconds,
        "trust_remote_code": trust_remote_code,
    }
    done = subprocess.run(
        # -P: a file called, say, types.py in the user's directory must not stand in for a module.
        [sys.executable, "-P", "-m", "kdcli.bench.worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        how = f"was ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "failed"
        last = (done.stderr.strip().splitlines() or ["it left no message"])[-1]
        raise MachineError(f"the latency worker {how}: {last}", "--set measure.latency=false skips it")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return Latency(answer["rows"], answer["speedups"])
