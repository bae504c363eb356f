"""What the processes of a run tell each other beside their work: who is there, who has failed, who is gone.

A collective waits as long as another process works, which may be hours. So each process says every second, through
torch's key-value store, that it is alive. When one fails or falls silent, all others end, and one message is said.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kdcli.engine.processes import parent_watches, take_slurm
from kdcli.errors import ChildFailed, KdcliError, MachineError, Stopped, UsageError

JOIN_SECONDS = "KDCLI_JOIN_SECONDS"
"""Environment variable: how long the processes of a run wait for each other at its start; 40 unless set."""
BEAT_SECONDS = 0.5
SILENT_BEATS = 80
"""Beats without a word after which a process counts as gone; own beats, so that a machine may be suspended."""
GRACE_SECONDS = 4.0
"""How long a process that is told of a failure has to end by itself."""
STOP_SECONDS = 40.0
"""The same where the other one was stopped, or ran out of memory."""
SAY_SECONDS = 10.0
"""How long a process that failed waits for the main one to say why."""
FAILED, SAID, ALL, OVER = "failed", "said", "all", "over"


class Silent(MachineError):
    """Another process of the run does not respond. A parent may not see that: its child still runs."""

    def __init__(self, which: str) -> None:
        super().__init__(
            f"{which} does not respond, and the others cannot continue without it",
            "continue with the same command and --resume",
        )


class Lost(MachineError):
    """Another process of the run is gone."""

    def __init__(self, which: str = "another process of this run") -> None:
        super().__init__(
            f"{which} has ended, and the others cannot go on without it",
            "see its own message, if it had time for one, then continue with --resume",
        )


_peers: Peers | None = None


def peers() -> Peers | None:
    """The other processes of the run, once it has joined them."""
    return _peers


def join() -> Peers | None:
    """Meet the other processes of the run, once; None where a launcher started no others. Raises UsageError: the
    launcher's environment cannot be used; MachineError: a process does not come."""
    global _peers
    take_slurm()
    if _peers is None and os.environ.get("WORLD_SIZE", "1") != "1":
        rank, size, host, port = _place()
        _peers = Peers(_meet(rank, host, port), rank, size)
        _peers.begin()
    return _peers


def _place() -> tuple[int, int, str, int]:
    """Rank, number of processes and the main process's address, of the launcher's environment."""
    env, names = os.environ, ("WORLD_SIZE", "RANK", "MASTER_PORT")
    if missing := [name for name in (*names, "LOCAL_RANK", "MASTER_ADDR") if not env.get(name)]:
        raise UsageError(
            f"WORLD_SIZE is {env['WORLD_SIZE']}, but {', '.join(missing)} is not set",
            "torchrun, srun and accelerate launch set all of them; --processes N starts several on one machine",
        )
    if wrong := [f"{name}={env[name]}" for name in names if not env[name].isdecimal()]:
        raise UsageError(f"{', '.join(wrong)} in the environment must be a whole number")
    size, rank, port = (int(env[name]) for name in names)
    if rank >= size:
        raise UsageError(f"RANK {rank} is none of 0 to {size - 1}, and WORLD_SIZE is {size}")
    return rank, size, env["MASTER_ADDR"], port


def _patience() -> float:
    given = os.environ.get(JOIN_SECONDS, "40")
    if not given.isdecimal() or not int(given):
        raise UsageError(f"{JOIN_SECONDS} must be a number of seconds, got '{given}'")
    return float(given)


def _absent(which: str) -> MachineError:
    return MachineError(
        f"{which} did not come within {_patience():.0f} s",
        f"see its own message; where machines start one after another, raise {JOIN_SECONDS}",
    )


def _meet(rank: int, host: str, port: int) -> Store:
    """The store of the run; the main process holds it unless torchrun does."""
    mine = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not mine and not _await(lambda: _answers(host, port), _patience()):
        raise _absent(f"process 0, at {host}:{port},")
    try:
        limit = timedelta(seconds=_patience())
        store = TCPStore(
            host, port, None, mine, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        hint = "another program may use the port: set another MASTER_PORT"
        raise MachineError(
            f"{host}:{port} cannot be used: {str(error).splitlines()[0]}", hint
        ) from None
    store.set_timeout(timedelta(seconds=GRACE_SECONDS))
    # A restart by torchrun finds the same store.
    return PrefixStore(f"kdcli/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=GRACE_SECONDS).close()
    except OSError:
        # Its name, too, may not be known before the machine is up.
        return False
    return True


class Peers:
    """The processes of a run, seen from one of them; the main process watches all, the others watch it."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._watched = range(1, size) if rank == 0 else range(1)
        self._beats: list[bytes] = []
        self._exchanges: int | None = 0  # None once the store is gone
        self._unchanged: dict[
            int | None, tuple[object, int]
        ] = {}  # rank, or None for the store -> last word, beats
        self._failure: dict[str, Any] | None = None  # the first of the run
        self._ending, self._left = threading.Event(), threading.Event()
        self._voice = threading.Lock()  # of the thread that says why this process ends
        works = (self._exchange, self._watch)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]

    def begin(self) -> None:
        """Wait until all are here, then watch. Raises MachineError: one does not come."""
        hosts, limit = (
            [f"host/{rank}" for rank in range(self._size)],
            time.monotonic() + _patience(),
        )
        self._store.set(f"beat/{self._rank}", "")
        self._store.set(hosts[self._rank], socket.gethostname())
        atexit.register(self._leave)
        while not self._store.check([ALL]):
            if self._heard():
                self.check()
            if self._rank == 0 and self._store.check(hosts):
                self._store.set(ALL, "")
            elif time.monotonic() > limit + (GRACE_SECONDS if self._rank else 0):
                missing = [
                    str(rank) for rank, key in enumerate(hosts) if not self._store.check([key])
                ]
                raise _absent(f"process {', '.join(missing)} of {self._size}")
            time.sleep(0.02)
        for thread in self._threads:
            thread.start()

    def failed(self) -> int | None:
        """The exit code of another process that failed, if one did; its word may take a moment. This process is left to
        end by itself."""
        _await(self._heard, 3 * BEAT_SECONDS)
        self._ending.set()
        return self._failure["code"] if self._failure else None

    def check(self) -> None:
        """Raise ChildFailed if another process has failed: collectives that it broke left no sums."""
        if self._failure is not None:
            raise ChildFailed(self._failure["code"])

    def end(self, error: KdcliError) -> KdcliError:
        """Tell the others of the error that ends this process. Returns what is left to say here: the first failure of
        all in the main process, nothing in the others as long as it lives."""
        self._ending.set()
        if not self._voice.acquire(blocking=False):
            return ChildFailed(error.exit_code)
        try:
            return self._settled(error)
        except RuntimeError:
            # The main process is gone, and the store with it.
            speaks = not parent_watches() and self._speaks_for_machine()
            return error if speaks else ChildFailed(error.exit_code)

    def _settled(self, error: KdcliError) -> KdcliError:
        own = not isinstance(error, Lost | ChildFailed)
        if not own and not _await(self._heard, 3 * BEAT_SECONDS) and parent_watches():
            return ChildFailed(error.exit_code)
        if not self._heard():
            self._tell(error)
        first = self._failure
        assert first is not None
        if self._rank == 0:
            self._store.set(SAID, "")
            return error if own else _told(first)
        # A process that was stopped leaves at once: the main one may wait for it in a collective.
        others = first["rank"] != self._rank or isinstance(error, Stopped)
        if others or _await(lambda: self._store.check([SAID]), SAY_SECONDS):
            return ChildFailed(error.exit_code if own else first["code"])
        return error

    def _tell(self, error: KdcliError) -> None:
        """Put a failure into the store, unless there is one already."""
        of = (
            ""
            if isinstance(error, Lost | Silent)
            else f"process {self._rank} ({socket.gethostname()}): "
        )
        what = {
            "rank": self._rank,
            "code": error.exit_code,
            "message": of + error.message,
            "hint": error.hint,
        }
        what |= {"lost": isinstance(error, Lost)}
        self._failure = json.loads(self._store.compare_set(FAILED, "", json.dumps(what)))

    def _heard(self) -> bool:
        """True once any process has failed."""
        if self._failure is None and self._store.check([FAILED]):
            self._failure = json.loads(self._store.get(FAILED))
        return self._failure is not None

    def _exchange(self) -> None:
        """Say that this process is alive, and read what the others say."""
        count = 0
        try:
            while not self._left.wait(BEAT_SECONDS):
                self._exchanges = count = count + 1
                self._store.set(f"beat/{self._rank}", str(count))
                self._beats = self._store.multi_get([f"beat/{rank}" for rank in self._watched])
                if not self._heard() and self._store.check([OVER]):
                    self._left.set()
        except RuntimeError:
            self._exchanges = None

    def _watch(self) -> None:
        """End this process when another has failed or is gone, unless it ends by itself."""
        while self._failure is None:
            if self._left.wait(BEAT_SECONDS):
                return
            self._look()
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
            torch.distributed.distributed_c10d._get_default_group().abort()
        # A process that was stopped frees the main one, which then writes a checkpoint, only with its end.
        seconds = STOP_SECONDS if self._failure["code"] == Stopped.exit_code else GRACE_SECONDS
        if self._ending.wait(seconds) or not self._voice.acquire(blocking=False):
            return
        if self._rank in (0, self._failure["rank"]) and not (
            self._failure.get("lost") and parent_watches()
        ):
            sys.stderr.write(
                "\n".join(
                    ["", f"error: {self._failure['message']}", self._failure["hint"] or "", ""]
                )
            )
            sys.stderr.flush()
        if self._rank == 0:
            self._store.set(SAID, "")
        self._leave()
        os._exit(self._failure["code"])

    def _look(self) -> None:
        gone = self._exchanges is None
        if gone or self._silent(None, self._exchanges):
            watched = gone and parent_watches()
            speaks = self._rank if not watched and self._speaks_for_machine() else None
            lost: MachineError = Lost("the main process") if gone else Silent("the main process")
            self._exchanges = None
            self._failure = {
                "rank": speaks,
                "code": lost.exit_code,
                "message": lost.message,
                "hint": lost.hint,
            }
            return
        for rank, beat in zip(self._watched, self._beats, strict=False):
            if self._silent(rank, beat) and not self._store.check([f"left/{rank}"]):
                host = self._store.get(f"host/{rank}").decode()
                self._tell(Silent(f"process {rank} ({host})"))

    def _silent(self, whose: int | None, word: object) -> bool:
        before, beats = self._unchanged.get(whose, (None, 0))
        self._unchanged[whose] = word, beats + 1 if word == before else 0
        return self._unchanged[whose][1] >= SILENT_BEATS

    def _speaks_for_machine(self) -> bool:
        """True in one process of each machine if the main process is gone."""
        return self._rank == 1 or os.environ["LOCAL_RANK"] == "0"

    def _leave(self) -> None:
        """Say that this process has ended; the main one keeps the store until all have."""
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
                if not self._heard():
                    self._store.set(OVER, "")
                here = [rank for rank in self._watched if self._store.check([f"host/{rank}"])]
                _await(lambda: self._store.check([f"left/{rank}" for rank in here]), SAY_SECONDS)
        except RuntimeError:
            # Nobody is left to be told: the main process was faster.
            return


def _told(failure: dict[str, Any]) -> KdcliError:
    """The failure of another process."""
    error = KdcliError(failure["message"], failure["hint"])
    error.exit_code = failure["code"]
    return error


def _await(true: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < limit:
        time.sleep(0.05)
    return found
