"""The processes of a run watch each other, so that none waits forever for another one.

A collective waits for as long as another process works, which may be hours. Therefore every process
reports twice a second, through torch's key-value store, that it is alive. If one of them fails or
stops responding, the others end as well, and one error is printed.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kdcli.engine.processes import parent_watches, take_slurm
from kdcli.errors import ChildFailed, KdcliError, MachineError, Stopped, UsageError

JOIN_SECONDS = "KDCLI_JOIN_SECONDS"
"""Environment variable: seconds that the processes wait for each other at the start (default 40).
"""
BEAT_SECONDS = 0.5
MAX_SILENT_BEATS = 80
"""Beats after which a silent process counts as gone. Each process counts its own beats, so that no
process is lost if the machine is suspended."""
GRACE_SECONDS = 4.0
"""Seconds that a process has to end by itself after it learns of a failure."""
STOP_SECONDS = 40.0
"""Seconds that it has if the other process was stopped or ran out of memory."""
REPORT_SECONDS = 10.0
"""Seconds that a failed process waits for the main one to print the error."""
FAILED_KEY, REPORTED_KEY, ALL_HERE_KEY, OVER_KEY = "failed", "reported", "all here", "over"
"""Keys of the store."""


class Lost(MachineError):
    """Another process of the run has ended without reporting an error."""

    def __init__(self, which: str = "another process of this run") -> None:
        super().__init__(
            f"{which} has ended, and the others cannot continue without it",
            "see its own message, if it had time for one, then continue with --resume",
        )


class Silent(MachineError):
    """Another process of the run does not respond, although it may still exist."""

    def __init__(self, which: str) -> None:
        super().__init__(
            f"{which} does not respond, and the others cannot continue without it",
            "continue with the same command and --resume",
        )


@dataclass(frozen=True)
class RunFailure:
    """The first failure of a run.

    Attributes:
        rank: The process that may print the error, besides the main one; None for no other.
        code: The exit code of all processes.
        message: The error.
        hint: The advice that is printed after it.
        lost: Whether a process has ended without reporting an error. If kdcli started the
            processes, their parent prints which one it was.
    """

    rank: int | None
    code: int
    message: str
    hint: str | None
    lost: bool = False

    @classmethod
    def of(cls, error: KdcliError, rank: int | None) -> RunFailure:
        """Describe the error that ends a process."""
        lost = isinstance(error, Lost)
        return cls(rank, error.exit_code, error.message, error.hint, lost)

    def error(self) -> KdcliError:
        """Return the failure as an error of this process."""
        error = KdcliError(self.message, self.hint)
        error.exit_code = self.code
        return error


_peers: Peers | None = None


def peers() -> Peers | None:
    """Return the other processes of the run, or None before `join` and in a run of one process."""
    return _peers


def join() -> Peers | None:
    """Meet the other processes of the run. Only the first call does anything.

    Returns:
        None if no launcher started several processes.

    Raises:
        UsageError: The launcher's environment variables are incomplete or wrong.
        MachineError: A process does not join.
    """
    global _peers
    take_slurm()
    if _peers is None and os.environ.get("WORLD_SIZE", "1") != "1":
        place = Place.read()
        _peers = Peers(_open_store(place), place.rank, place.size)
        _peers.begin()
    return _peers


@dataclass(frozen=True)
class Place:
    """The launcher's environment variables.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
        host, port: The address of the main process.
    """

    rank: int
    size: int
    host: str
    port: int

    @classmethod
    def read(cls) -> Place:
        """Read the environment.

        Raises:
            UsageError: A variable is missing or wrong.
        """
        env, numbers = os.environ, ("WORLD_SIZE", "RANK", "MASTER_PORT")
        missing = [name for name in (*numbers, "LOCAL_RANK", "MASTER_ADDR") if not env.get(name)]
        if missing:
            raise UsageError(
                f"WORLD_SIZE is {env['WORLD_SIZE']}, but {', '.join(missing)} is not set",
                "torchrun, srun and accelerate launch set all of them; "
                "--processes N starts several processes on one machine",
            )
        wrong = [f"{name}={env[name]}" for name in numbers if not env[name].isdecimal()]
        if wrong:
            raise UsageError(f"{', '.join(wrong)} in the environment must be a whole number")
        size, rank, port = (int(env[name]) for name in numbers)
        if rank >= size:
            raise UsageError(f"RANK is {rank}, but WORLD_SIZE {size} allows only 0 to {size - 1}")
        return cls(rank, size, env["MASTER_ADDR"], port)


def _join_seconds() -> float:
    value = os.environ.get(JOIN_SECONDS, "40")
    if not value.isdecimal() or not int(value):
        raise UsageError(f"{JOIN_SECONDS} must be a number of seconds, got '{value}'")
    return float(value)


def _absent(which: str) -> MachineError:
    return MachineError(
        f"{which} did not come within {_join_seconds():.0f} s",
        f"see its own message; if machines start one after another, raise {JOIN_SECONDS}",
    )


def _open_store(place: Place) -> Store:
    """Open the run's key-value store. The main process hosts it, unless torchrun does."""
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts, address = place.rank == 0 and not in_agent, f"{place.host}:{place.port}"
    if not hosts and not _wait_until(lambda: _answers(place), _join_seconds()):
        raise _absent(f"process 0, at {address},")
    try:
        store = TCPStore(
            place.host,
            place.port,
            None,
            hosts,
            timeout=timedelta(seconds=_join_seconds()),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MachineError(
            f"{address} cannot be used: {reason}",
            "another program may use the port; set another MASTER_PORT",
        ) from None
    store.set_timeout(timedelta(seconds=GRACE_SECONDS))
    # After a restart, torchrun offers the same store again.
    return PrefixStore(f"kdcli/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _answers(place: Place) -> bool:
    try:
        socket.create_connection((place.host, place.port), timeout=GRACE_SECONDS).close()
    except OSError:
        # Before the other machine is up, even its name may be unknown.
        return False
    return True


class Peers:
    """The processes of a run, seen from one of them.

    The main process watches all others, and the others watch the main one.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._watched = range(1, size) if rank == 0 else range(1)
        self._launcher = os.getppid()
        self._beats: list[bytes] = []
        # The number of exchanges with the store; None once the store is gone.
        self._exchanges: int | None = 0
        # Rank, or None for the store -> its last message, and the number of beats since then.
        self._unchanged: dict[int | None, tuple[object, int]] = {}
        self._failure: RunFailure | None = None
        self._ending, self._left = threading.Event(), threading.Event()
        # The thread that reports why this process ends holds this lock.
        self._report_lock = threading.Lock()
        works = (self._exchange, self._watch)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]

    def begin(self) -> None:
        """Wait until all processes are here, then watch them.

        Raises:
            MachineError: A process does not join.
        """
        keys = [f"host/{rank}" for rank in range(self._size)]
        limit = time.monotonic() + _join_seconds() + (GRACE_SECONDS if self._rank else 0)
        self._store.set(f"beat/{self._rank}", "")
        self._store.set(keys[self._rank], socket.gethostname())
        atexit.register(self._leave)
        while not self._store.check([ALL_HERE_KEY]):
            if self._any_failed():
                self.check()
            if self._rank == 0 and self._store.check(keys):
                self._store.set(ALL_HERE_KEY, "")
            elif time.monotonic() > limit:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise _absent(f"process {', '.join(map(str, missing))} of {self._size}")
            time.sleep(0.02)
        for thread in self._threads:
            thread.start()

    def failed(self) -> int | None:
        """Return the exit code of another process if one failed.

        The message may take a moment to arrive. Afterwards this process may end by itself.
        """
        _wait_until(self._any_failed, 3 * BEAT_SECONDS)
        self._ending.set()
        return self._failure.code if self._failure else None

    def check(self) -> None:
        """Raise ChildFailed if another process failed, because sums over ranks are then invalid."""
        if self._failure is not None:
            raise ChildFailed(self._failure.code)

    def end(self, error: KdcliError) -> KdcliError:
        """Tell the other processes of the error that ends this one.

        Returns:
            The error that this process should still print. In the main process, this is the first
            failure of the run. The others print nothing as long as the main process lives.
        """
        self._ending.set()
        if not self._report_lock.acquire(blocking=False):
            return ChildFailed(error.exit_code)
        try:
            return self._settle(error)
        except RuntimeError:
            # The main process is gone, and the store with it.
            reports = not parent_watches() and self._reports_for_machine()
            return error if reports else ChildFailed(error.exit_code)

    def _settle(self, error: KdcliError) -> KdcliError:
        own = not isinstance(error, Lost | ChildFailed)
        if not own and not _wait_until(self._any_failed, 3 * BEAT_SECONDS) and parent_watches():
            return ChildFailed(error.exit_code)
        if not self._any_failed():
            self._publish_failure(error)
        first = self._failure
        assert first is not None
        if self._rank == 0:
            self._store.set(REPORTED_KEY, "")
            return error if own else first.error()
        # A process that was stopped leaves at once: the main one may wait for it in a collective.
        leaves = first.rank != self._rank or isinstance(error, Stopped)
        if leaves or _wait_until(lambda: self._store.check([REPORTED_KEY]), REPORT_SECONDS):
            return ChildFailed(error.exit_code if own else first.code)
        return error

    def _publish_failure(self, error: KdcliError) -> None:
        """Write a failure to the store, unless it already has one."""
        failure = RunFailure.of(error, self._rank)
        if not isinstance(error, Lost | Silent):
            where = f"process {self._rank} ({socket.gethostname()})"
            failure = replace(failure, message=f"{where}: {failure.message}")
        first = self._store.compare_set(FAILED_KEY, "", json.dumps(asdict(failure)))
        self._failure = RunFailure(**json.loads(first))

    def _any_failed(self) -> bool:
        """Return True once any process has failed."""
        if self._failure is None and self._store.check([FAILED_KEY]):
            self._failure = RunFailure(**json.loads(self._store.get(FAILED_KEY)))
        return self._failure is not None

    def _exchange(self) -> None:
        """Report again and again that this process is alive, and read what the others report."""
        count, orphaned = 0, False
        try:
            while not self._left.wait(BEAT_SECONDS):
                self._exchanges = count = count + 1
                self._store.set(f"beat/{self._rank}", str(count))
                self._beats = self._store.multi_get([f"beat/{rank}" for rank in self._watched])
                if not self._any_failed() and self._store.check([OVER_KEY]):
                    self._left.set()
                if parent_watches() and not orphaned and os.getppid() != self._launcher:
                    # Whoever killed kdcli's launcher wanted to stop the run. A training then stops
                    # with a checkpoint.
                    orphaned = True
                    os.kill(os.getpid(), signal.SIGTERM)
        except RuntimeError:
            self._exchanges = None

    def _watch(self) -> None:
        """End this process if another one failed or is gone, unless it ends by itself."""
        while self._failure is None:
            if self._left.wait(BEAT_SECONDS):
                return
            self._find_lost_peers()
        failure = self._failure
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
            torch.distributed.distributed_c10d._get_default_group().abort()
        # The end of a stopped process frees the main one, which then writes a checkpoint.
        seconds = STOP_SECONDS if failure.code == Stopped.exit_code else GRACE_SECONDS
        if self._ending.wait(seconds) or not self._report_lock.acquire(blocking=False):
            return
        launcher_reports = failure.lost and parent_watches()
        if self._rank in (0, failure.rank) and not launcher_reports:
            lines = ["", f"error: {failure.message}", failure.hint or "", ""]
            sys.stderr.write("\n".join(lines))
            sys.stderr.flush()
        if self._rank == 0:
            self._store.set(REPORTED_KEY, "")
        self._leave()
        os._exit(failure.code)

    def _find_lost_peers(self) -> None:
        """Look for a process that is gone."""
        gone = self._exchanges is None
        if gone or self._is_silent(None, self._exchanges):
            error = Lost("the main process") if gone else Silent("the main process")
            launcher_reports = gone and parent_watches()
            reports = not launcher_reports and self._reports_for_machine()
            self._exchanges = None
            self._failure = replace(
                RunFailure.of(error, self._rank if reports else None), lost=False
            )
            return
        for rank, beat in zip(self._watched, self._beats, strict=False):
            if self._is_silent(rank, beat) and not self._store.check([f"left/{rank}"]):
                host = self._store.get(f"host/{rank}").decode()
                self._publish_failure(Silent(f"process {rank} ({host})"))

    def _is_silent(self, rank: int | None, word: object) -> bool:
        before, beats = self._unchanged.get(rank, (None, 0))
        beats = beats + 1 if word == before else 0
        self._unchanged[rank] = word, beats
        return beats >= MAX_SILENT_BEATS

    def _reports_for_machine(self) -> bool:
        """Return True in one process of each machine that prints if the main process is gone."""
        return self._rank == 1 or os.environ["LOCAL_RANK"] == "0"

    def _leave(self) -> None:
        """Report that this process has ended. The main one keeps the store until all have."""
        self._ending.set()
        self._left.set()
        # A thread that is inside the store when the interpreter ends would abort the process.
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(2 * GRACE_SECONDS)
        if self._exchanges is None:
            return
        try:
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                if not self._any_failed():
                    self._store.set(OVER_KEY, "")
                here = [rank for rank in self._watched if self._store.check([f"host/{rank}"])]
                left = [f"left/{rank}" for rank in here]
                _wait_until(lambda: self._store.check(left), REPORT_SECONDS)
        except RuntimeError:
            # The main process ended first, so there is no process left to tell.
            return


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds. Return False if it does not within `seconds`."""
    limit = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < limit:
        time.sleep(0.05)
    return holds
