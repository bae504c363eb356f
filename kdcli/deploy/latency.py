"""Measure the latency of several models, interleaved, in one worker process.

On a shared machine, measuring one model after the other gave speed-ups between 2.6x and 23x for the
same pair. Interleaved runs expose all models to the same drift. A speed-up is the median of the
ratios within each round, with quartiles. An unstable cell is measured again; if it stays unstable,
a lower bound is the reported speed-up; see `Speedup`.
"""

import contextlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from kdcli.custom_code import custom_code_allowed
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.measurements import Agreement, Failure, LatencyRow
from kdcli.deploy.old_machines.measure_encoders import MAX_MEASUREMENTS
from kdcli.engine.progress import LINE_SECONDS
from kdcli.engine.threads import measuring_environment
from kdcli.errors import MachineError, last_message
from kdcli.messages import log, time_left

CELLS = ((1, 128), (8, 128))  # (batch size, tokens) that every report measures


@dataclass(frozen=True)
class Subject:
    """A model, with its name in the report, on a backend of `kdcli.deploy.runners`."""

    name: str
    source: str  # directory, hub id, or a shape such as `6x384`, which gets random weights
    backend: str = "torch"
    precision: str = "fp32"


@dataclass(frozen=True)
class Protocol:
    """How to measure latency.

    A measurement of a cell ends when each subject has `min_runs` runs and all subjects together
    have run for `min_seconds`. A cell whose times are unstable is measured up to
    `max_measurements` times, or only once if it is not the first and `only_first_again` is set.
    `padding` is `full` (no padding), `random` (lengths from a quarter of
    a cell's tokens upwards) or `data` (lengths drawn from `lengths`).
    """

    device: str
    min_runs: int
    min_seconds: float
    cells: Sequence[tuple[int, int]] = CELLS
    max_measurements: int = MAX_MEASUREMENTS
    only_first_again: bool = False
    padding: str = "full"
    lengths: Sequence[int] = ()  # number of tokens of real examples, cut to the cell's tokens
    # Real text on which backends are compared with torch in float32. Without it, ids are random.
    texts: Sequence[str] = ()


@dataclass
class Latency:
    """Measurements of several models.

    Attributes:
        prepared: The number of models that were loaded, and exported if their backend needs it.
        interrupted: Whether Ctrl-C or the deadline ended the measurement.
    """

    rows: list[LatencyRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    prepared: int = 0
    interrupted: bool = False

    def read(self, message: Mapping[str, Sequence[object]]) -> None:
        """Add the rows, failures, agreements and prepared models in a worker's message."""
        self.rows += map(LatencyRow.model_validate, message.get("rows", ()))
        self.failures += map(Failure.model_validate, message.get("failures", ()))
        self.agreements += map(Agreement.model_validate, message.get("agreements", ()))
        self.prepared += len(message.get("prepared", ()))

    def extend(self, other: "Latency") -> None:
        """Add the measurements of another worker."""
        self.rows += other.rows
        self.failures += other.failures
        self.agreements += other.agreements
        self.prepared += other.prepared
        self.interrupted = self.interrupted or other.interrupted


@dataclass
class _Lines:
    """The log lines of a measurement. Parts that take less than `LINE_SECONDS` log nothing."""

    subjects: Sequence[Subject]
    first: float | None = None  # When the first model was prepared, after the worker's start.
    last: float = field(default_factory=time.monotonic)

    def show(self, message: Mapping[str, Sequence[object]], prepared: int) -> None:
        """Log what a worker's message says about its progress."""
        now, number = time.monotonic(), len(self.subjects)
        if "prepared" in message and self.first is None:
            self.first, self.last = now, now
        elif "prepared" in message and now - self.last >= LINE_SECONDS:
            assert self.first is not None
            left = (now - self.first) / (prepared - 1) * (number - prepared)
            log(f"{prepared} of {number} models prepared  {time_left(left)}")
            self.last = now
        if "measuring" in message:
            batch_size, seq_len, seconds, count = message["measuring"]
            if float(str(seconds)) >= LINE_SECONDS:
                models = f"{number} models in turns" if number > 1 else "the model"
                longer = ", longer if the times are unstable"
                log(
                    f"timing {models} on {batch_size} x {seq_len} tokens: about {seconds} s"
                    + (longer if int(str(count)) > 1 else "")
                )
                self.last = now


def measure_latency(
    subjects: Sequence[Subject], protocol: Protocol, deadline: float = math.inf
) -> Latency:
    """Measure base encoders; the first subject is the baseline of every speed-up.

    A subject that does not fit into memory or has wrong output becomes a failure in the result.
    Ctrl-C keeps the finished cells, and so does the deadline, a value of `time.monotonic()`. Raises
    MachineError if the worker died; the message has its last line or its signal.
    """
    request = {
        "subjects": list(map(asdict, subjects)),
        "protocol": asdict(protocol),
        "threads": latency_threads(),
        "custom_code": custom_code_allowed(),
    }
    latency, lines = Latency(), _Lines(subjects)
    with tempfile.TemporaryFile("w+") as errors:
        # With -P, a file such as types.py in the current directory cannot shadow a module.
        command = [sys.executable, "-P", "-m", "kdcli.deploy.worker"]
        pipe = subprocess.PIPE
        environment = measuring_environment()
        worker = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        timer = threading.Timer(
            min(deadline - time.monotonic(), threading.TIMEOUT_MAX), worker.kill
        )
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(request))
                worker.stdin.close()
            for line in worker.stdout:
                # Libraries print to stdout too. The worker's own messages are JSON.
                if line.startswith("{"):
                    message = json.loads(line)
                    latency.read(message)
                    lines.show(message, latency.prepared)
            code = worker.wait()
        except KeyboardInterrupt:
            worker.kill()
            worker.wait()
            latency.interrupted = True
            return latency
        finally:
            timer.cancel()
        errors.seek(0)
        reason = last_message(errors.read()) or "it left no message"
    if code and time.monotonic() >= deadline:
        latency.interrupted = True
        return latency
    if code:
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"
        raise MachineError(
            f"the latency worker {end}: {reason}",
            "skip the measurement with --set measure.latency=false",
        )
    return latency
