"""Latency of several models, measured interleaved in one worker process.

Run one after the other, the same pair of models has given speed-ups between 2.6x and 23x on a shared machine; taken in
turns the drift hits all alike. A speed-up is the median of the ratios within each round, with the quartiles beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kdcli.bench.environment import latency_threads
from kdcli.errors import MachineError

CELLS = ((1, 128), (8, 128))
"""(batch size, tokens) every report measures."""


@dataclass(frozen=True)
class Subject:
    """What is measured: a model under a backend.

    Attributes:
        name: of the model in the report.
        source: directory, hub id, or a shape such as `6x384`, for which random weights do.
        backend, precision: see `kdcli.backends.runners`.
    """

    name: str
    source: str
    backend: str = "torch"
    precision: str = "fp32"


@dataclass(frozen=True)
class Protocol:
    """How it is measured.

    Attributes:
        cells: (batch size, tokens).
        padding: `full` has none; `random` draws lengths from a quarter of a cell's tokens up; `data` takes `lengths`.
        lengths: tokens of real examples, for `data`; longer ones are cut to the cell's.
        texts: real text on which backends are compared with torch in float32; random ids where there is none.
        min_runs, min_seconds: every cell goes on until each subject ran so often and all together ran so long.
    """

    device: str
    min_runs: int
    min_seconds: float
    cells: Sequence[tuple[int, int]] = CELLS
    padding: str = "full"
    lengths: Sequence[int] = ()
    texts: Sequence[str] = ()
    trust_remote_code: bool = False


@dataclass
class Latency:
    """What was measured, as it stands in report.json; `interrupted` when the user stopped it before its end."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    speedups: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    agreements: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False

    def add(self, answer: dict[str, Any]) -> None:
        """Take over what a worker said."""
        self.rows += answer.get("rows", [])
        self.speedups |= answer.get("speedups", {})
        self.failures += answer.get("failures", [])
        self.agreements += answer.get("agreements", [])


def measure_latency(subjects: Sequence[Subject], protocol: Protocol) -> Latency:
    """Measure base encoders; the first subject is the baseline of every speed-up.

    A cell that does not fit, or a subject whose output is wrong, is a failure in the result and the rest goes on;
    Ctrl-C keeps the cells that are measured.

    Raises:
        MachineError: the worker died; its last line, or the signal that ended it, is given.
    """
    request = {
        "subjects": [dataclasses.asdict(subject) for subject in subjects],
        "threads": latency_threads(),
        **dataclasses.asdict(protocol),
    }
    found = Latency()
    with tempfile.TemporaryFile("w+") as errors:
        # -P: a file called, say, types.py in the user's directory must not stand in for a module.
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "kdcli.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(request))
                worker.stdin.close()
            for line in worker.stdout:
                # Libraries print too; what the worker says is JSON.
                if line.startswith("{"):
                    found.add(json.loads(line))
            code = worker.wait()
        except KeyboardInterrupt:
            worker.kill()
            worker.wait()
            found.interrupted = True
            return found
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if code:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"
        last = (said or ["it left no message"])[-1]
        raise MachineError(f"the latency worker {how}: {last}", "--set measure.latency=false skips it")
    return found
