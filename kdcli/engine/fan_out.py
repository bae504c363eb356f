"""Start a command once per device and wait for all of its processes.

kdcli does this itself, because the launchers of torch and accelerate replace exit codes by 1. Torch
elastic in-process keeps them; docs/evidence/speed.md, "Starting processes", says why it is not
used.
This module imports nothing heavy.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from kdcli.engine.processes import INTERRUPTED, PARENT, handled_signals
from kdcli.errors import Interrupted, KdcliError, MachineError, Stopped

Process = subprocess.Popen[bytes]

POLL_SECONDS = 0.1
END_SECONDS = 10.0
"""Seconds that the other processes have to end by themselves after one failed."""
SAVE_SECONDS = 600.0
"""Seconds that they have if one was stopped, so that the main process can write a checkpoint."""
REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")
"""Signals by which a user ends a process."""
MACHINE_FAULTS = ("SIGKILL", "SIGBUS", "SIGILL", "SIGXCPU", "SIGXFSZ")
"""Signals by which a machine ends a process: no memory, a full disk below a memory map, a processor
that lacks an instruction, a limit. Any other signal means that a library crashed."""


def fan_out(arguments: Sequence[str], count: int, *, on_cpu: bool) -> int:
    """Run `kdcli ARGUMENTS` as several processes of one run.

    Signals are forwarded to the processes. If one of them fails, the others are ended.

    Args:
        arguments: The command line without `kdcli`.
        count: The number of processes.
        on_cpu: The processes compute on the CPU and share its cores.

    Returns:
        The exit code of a process that failed and has printed why, or 0.

    Raises:
        Interrupted: A signal ended a process before it could write a checkpoint.
        MachineError: The machine ended a process, often for lack of memory.
        KdcliError: A process crashed in a library.
    """
    # -P: a file torch.py or kdcli.py in the working directory must not shadow a module.
    command = [sys.executable, "-P", "-m", "kdcli", *arguments]
    shared = _environment(count, on_cpu=on_cpu)
    processes = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]

    def forward(number: int, frame: FrameType | None) -> None:
        # In a terminal, Ctrl-C reaches all processes anyway.
        if number == signal.SIGTERM or not sys.stdin.isatty():
            for process in processes:
                process.send_signal(number)

    with handled_signals(forward):
        first = _wait(processes)
    if first is None:
        return 0
    code = processes[first].returncode
    if code < 0:
        raise _ended_by(signal.Signals(-code), f"process {first} of {count}")
    # A process that lost another one ends with 3. The other one's code says more.
    codes = [process.returncode for process in processes if process.returncode > 0]
    return next((code for code in codes if code != MachineError.exit_code), code)


def _environment(count: int, *, on_cpu: bool) -> dict[str, str]:
    """Return the environment of the processes, as torchrun sets it, without the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = dict(os.environ)
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PARENT: str(os.getpid())}
    # A crash in a library then prints where it happened.
    shared.setdefault("PYTHONFAULTHANDLER", "1")
    if on_cpu:
        shared["ACCELERATE_USE_CPU"] = "true"
        shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    return shared


def _wait(processes: Sequence[Process]) -> int | None:
    """Wait until all processes have ended.

    After a failure, processes that do not end in time are killed.

    Returns:
        The process that failed first, or None if none failed.
    """
    first, limit = None, float("inf")
    try:
        while time.monotonic() < limit:
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if first is None and failed:
                # Prefer a process killed by a signal over the ones that failed because it died.
                first = min(failed, key=lambda rank: (codes[rank] or 0) > 0)
                stopped = codes[first] == Stopped.exit_code
                limit = time.monotonic() + (SAVE_SECONDS if stopped else END_SECONDS)
            if None not in codes:
                break
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return first


def _ended_by(number: signal.Signals, which: str) -> KdcliError:
    """Return the error for a process that was ended by a signal."""
    if number.name in REQUESTS:
        return Interrupted(INTERRUPTED)
    message = f"{which} was ended by signal {number.value} ({number.name})"
    if number.name in MACHINE_FAULTS:
        return MachineError(message, "often for lack of memory; continue with --resume")
    return KdcliError(message, "a library crashed; the lines above say where")
