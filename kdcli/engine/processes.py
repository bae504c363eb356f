"""The processes of a run, one per device, and their stop signals.

Under torchrun, `srun` or `accelerate launch`, accelerate joins the processes by their environment,
which `take_slurm` completes. Otherwise `fan_out` starts the same command once per device. kdcli
does this itself, because it guarantees its exit codes, and the launchers of torch and accelerate
always exit with 1 if a child fails.
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
from contextvars import ContextVar
from types import FrameType

from kdcli.errors import Interrupted, Stopped
from kdcli.messages import slurm_tasks

INTERRUPTED = "interrupted; no checkpoint of this step was written"
PARENT = "KDCLI_PARENT"
"""Environment variable of the processes that kdcli starts itself."""
prepare_child: Callable[[], object] = contextlib.nullcontext
"""Prepares the libraries of a process of a pool as the command prepared its own."""
TWICE_SECONDS = 1.0
"""A second SIGTERM within this time is the same signal, sent to a process and to its group."""


REPEAT_SECONDS = 0.05
"""The time after which a signal is repeated that a destructor dropped."""


class StopRequest:
    """Whether a run should stop: a signal asked for it, or its time is up.

    Attributes:
        signalled: SIGTERM or Ctrl-C arrived.
        insisted: A second signal arrived, so nothing more may be saved.
        deadline: The value of `time.monotonic()` at which the run should stop.
        at_once: The first signal raises KeyboardInterrupt, because no training would see it.
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

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Record a signal. Raises KeyboardInterrupt if it says to end at once."""
        if self.take(signum):
            raise KeyboardInterrupt


@contextlib.contextmanager
def _not_swallowed(request: StopRequest) -> Iterator[None]:
    """Repeat a signal whose KeyboardInterrupt Python drops, because a destructor was running."""
    before = sys.unraisablehook

    def repeat(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt) or not request.signalled:
            before(dropped)
            return
        request.signalled = False
        # After the destructor.
        threading.Timer(REPEAT_SECONDS, os.kill, (os.getpid(), signal.SIGTERM)).start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before


_request: StopRequest | None = None
"""The request of the `stop_requests` that is open in this process."""
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"
_ends_at_once: ContextVar[bool] = ContextVar("ends_at_once", default=False)
"""Whether a second signal may end this process, because it runs nothing but a command."""


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Let SIGTERM interrupt this process, which runs nothing but a command; a second one ends it.

    A process that calls kdcli as a library, such as a notebook's, would lose what it has in memory.
    """
    # The resource tracker removes what an ended process leaves, and would warn of it.
    sys.warnoptions.append(QUIET_TRACKER)
    token = _ends_at_once.set(True)
    try:
        with _interrupted_by_sigterm():
            yield
    finally:
        _ends_at_once.reset(token)
        sys.warnoptions.remove(QUIET_TRACKER)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that a staged directory is deleted.

    One of several processes keeps the default action, because Python runs no handler while the
    process waits for the others.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if joined() or not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    request = StopRequest(at_once=True)
    with handled_signals(request.handle, [signal.SIGTERM]), _not_swallowed(request), _watcher():
        yield


@contextlib.contextmanager
def stop_requests(*, at_once: bool = False) -> Iterator[StopRequest]:
    """Turn SIGTERM and Ctrl-C into a request to stop.

    A training looks at the request after every step. A second signal interrupts at once. Within
    `ends_at_once`, it does so even if the main thread waits in a library and cannot run Python's
    signal handlers.

    Inside another `stop_requests` this yields the outer one's request. A verb that runs other verbs
    sees in it that one of them was stopped, and can stop a training by the deadline. With
    `at_once`, the first signal already interrupts, except while an inner one is open.

    Only the main thread receives signals. In another thread, this yields a request that no signal
    makes.
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
    request = _request = StopRequest(at_once=at_once)
    try:
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(handled_signals(request.handle))
                stack.enter_context(_not_swallowed(request))
                if _ends_at_once.get():
                    stack.enter_context(_watcher())
            yield request
    except Stopped:
        if joined() and _ends_at_once.get():
            # All processes of a run stop together, and the signal may reach this one last.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    finally:
        _request = None


@contextlib.contextmanager
def handled_signals(
    handler: Callable[[int, FrameType | None], None],
    stops: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> Iterator[None]:
    """Handle signals, by default SIGTERM and Ctrl-C, and restore the handlers at the end."""
    before = {number: signal.signal(number, handler) for number in stops}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def _watcher() -> Iterator[None]:
    """End the process if the main thread does not react to a second signal."""
    seen = StopRequest()
    done = threading.Event()

    def watch() -> None:
        for signum in iter(lambda: receiver.recv(1), b""):
            if seen.take(signum[0]) and not done.wait(TWICE_SECONDS):
                sys.stderr.write(f"{INTERRUPTED}\n")
                sys.stderr.flush()
                os._exit(Interrupted.exit_code)

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    written = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(written)
        sender.close()
        watcher.join()
        receiver.close()


def parent_watches() -> bool:
    """Whether kdcli started this process, so that its parent reports when another is killed."""
    return PARENT in os.environ


def joined() -> bool:
    """Whether a launcher started this process as one of several."""
    return "WORLD_SIZE" in os.environ or slurm_tasks() > 1


def take_slurm() -> None:
    """Copy `srun`'s variables to the names that torch reads, unless another launcher set them."""
    if "WORLD_SIZE" in os.environ or slurm_tasks() == 1:
        return
    env = os.environ
    # `gpu[03-07,11],login` begins with gpu03.
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", env.get("SLURM_STEP_NODELIST", "localhost"))
    local_tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    assert first
    assert local_tasks
    env["WORLD_SIZE"] = str(slurm_tasks())
    env["RANK"] = env["SLURM_PROCID"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = local_tasks[0]
    env.setdefault("MASTER_ADDR", first[1] + (first[2] or ""))
    # The port is the same in all processes of a step, and differs between jobs.
    env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 10_000))


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
