"""The processes of a run, one a device, and their stop signals.

Under torchrun, `srun` or `accelerate launch`, accelerate joins the processes by their environment,
which `take_slurm` completes. Otherwise `fan_out` starts the same command once a device. It does so
itself because the launchers of torch and accelerate exit with 1 whatever a child's exit code was,
and kdcli promises its exit codes.
"""

import contextlib
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from kdcli.errors import Interrupted, MachineError, Stopped

POLL_SECONDS = 0.1
END_SECONDS = 10.0
"""What the other processes have to end by themselves once one has failed."""
SAVE_SECONDS = 600.0
"""The same where one was stopped, and the main one writes a checkpoint."""
INTERRUPTED = "interrupted; no checkpoint of this step was written"
PARENT = "KDCLI_PARENT"
"""Environment variable of the processes that kdcli starts itself."""
TWICE_SECONDS = 1.0
"""A second SIGTERM that comes sooner is the same one, sent to a process and to its group."""


class StopRequest:
    """Whether a run should stop: a signal asked for it, or its time is up.

    Attributes:
        signalled: SIGTERM or Ctrl-C arrived.
        insisted: a second signal arrived, so nothing more may be saved.
        deadline: the value of `time.monotonic()` at which the run should stop.
        at_once: the first signal raises KeyboardInterrupt, because no training would see it.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.signalled = self.insisted = False
        self.deadline, self.at_once = math.inf, at_once
        self._since = 0.0

    @property
    def requested(self) -> bool:
        """Whether a training should write a checkpoint and stop."""
        return self.signalled or time.monotonic() >= self.deadline

    def take(self, signum: int) -> bool:
        """Record a signal; return True if it says to end at once."""
        if not self.signalled:
            self.signalled, self._since = True, time.monotonic()
            return self.at_once
        again = signum == signal.SIGINT or time.monotonic() - self._since > TWICE_SECONDS
        self.insisted = self.insisted or again
        return again


_request: StopRequest | None = None
"""The request of the `stop_requests` that is open in this process."""


@contextlib.contextmanager
def stop_requests(*, at_once: bool = False) -> Iterator[StopRequest]:
    """Turn SIGTERM and Ctrl-C into a request to stop.

    A training looks at the request after every step. A second signal interrupts at once, even if
    the main thread waits in a library and runs no handlers of Python's.

    Inside another `stop_requests` this yields the outer one's request. A verb that runs other verbs
    sees in it that one of them was stopped, and can stop a training by the deadline. With
    `at_once`, the first signal already interrupts, except while an inner one is open.
    """
    global _request
    if _request is not None:
        outer, before = _request, _request.at_once
        outer.at_once = at_once
        try:
            yield outer
        finally:
            outer.at_once = before
        if outer.at_once and outer.signalled:
            # The training was in its last step. Nothing after it looks at the request.
            raise KeyboardInterrupt
        return
    request, seen, done = StopRequest(at_once=at_once), StopRequest(), threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        if request.take(signum):
            raise KeyboardInterrupt

    def watch() -> None:
        for signum in iter(lambda: receiver.recv(1), b""):
            if seen.take(signum[0]) and not done.wait(TWICE_SECONDS):
                sys.stderr.write(f"{INTERRUPTED}\n")
                sys.stderr.flush()
                os._exit(Interrupted.exit_code)

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    written = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    _request = request
    before_signals = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield request
    finally:
        done.set()
        _request = None
        for number, handler in before_signals.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(written)
        sender.close()
        watcher.join()
        receiver.close()


def parent_watches() -> bool:
    """True in a process that kdcli started: its parent says when another one is killed."""
    return PARENT in os.environ


def joined() -> bool:
    """True in a process that a launcher started as one of several."""
    return "WORLD_SIZE" in os.environ or _slurm_tasks() > 1


def _slurm_tasks() -> int:
    # Counts the tasks of an `srun` step; an `sbatch` script is one process whatever its allocation.
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def take_slurm() -> None:
    """Copy `srun`'s variables to the names torch reads, unless another launcher set them."""
    if "WORLD_SIZE" in os.environ or _slurm_tasks() == 1:
        return
    env = os.environ
    # `gpu[03-07,11],login` begins with gpu03.
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", env.get("SLURM_STEP_NODELIST", "localhost"))
    here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    assert first
    assert here
    env["WORLD_SIZE"] = str(_slurm_tasks())
    env["RANK"] = env["SLURM_PROCID"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = here[0]
    env.setdefault("MASTER_ADDR", first[1] + (first[2] or ""))
    # The same in all processes of a step, different between jobs.
    env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 10_000))


def is_main() -> bool:
    """True in the one process that may print and write."""
    own = os.environ.get("SLURM_PROCID", "0") if _slurm_tasks() > 1 else "0"
    return int(os.environ.get("RANK", own)) == 0


PEER_IS_GONE = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "remote server shutdown",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "collective operation timeout",
)


def lost_another(error: RuntimeError) -> bool:
    """Whether an error of torch means that another process of the run is gone."""
    # Gloo has no exception type for it. The types of the store are not loaded with the command
    # line, so they are known by name. A `DistBackendError` may also be a wrong call of NCCL, which
    # is a bug, so its message decides.
    of_store = type(error).__name__ in ("DistNetworkError", "DistStoreError")
    return joined() and (of_store or any(words in str(error) for words in PEER_IS_GONE))


class Child(Protocol):
    """A process that was started, as `subprocess.Popen` has it."""

    returncode: Any

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


def wait_for(children: Sequence[Child], until: Callable[[], bool] | None = None) -> int:
    """The exit code of one that failed, else 0. Signals are forwarded; when one fails, the others
    are stopped. Once `until` is true they are asked to stop. Raises MachineError: a signal ended a
    process."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for child in children:
            # Ctrl-C on a terminal already reached every process of its group.
            if child.poll() is None and (signum == signal.SIGTERM or not sys.stdin.isatty()):
                child.send_signal(signum)

    before = {s: signal.signal(s, pass_on) for s in (signal.SIGTERM, signal.SIGINT)}
    fallen, limit = 0, math.inf
    try:
        while time.monotonic() < limit:
            codes = [child.poll() for child in children]
            if limit == math.inf and any(codes):
                # One that was killed before those that end for want of it.
                fallen = min((code > 0, rank) for rank, code in enumerate(codes) if code)[1]
                limit = time.monotonic() + (
                    SAVE_SECONDS if codes[fallen] == Stopped.exit_code else END_SECONDS
                )
            if until is not None and until():
                pass_on(signal.SIGTERM, None)
                until = None
            if None not in codes:
                break
            time.sleep(POLL_SECONDS)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if children[fallen].returncode >= 0:
        # A process that lost another ends with MachineError; the other's code is more informative.
        own = [child.returncode for child in children if child.returncode > 0]
        return next((code for code in own if code != MachineError.exit_code), own[0] if own else 0)
    raise MachineError(
        f"process {fallen} of {len(children)} was ended by signal {-children[fallen].returncode}",
        "often for lack of memory; continue with --resume",
    )
