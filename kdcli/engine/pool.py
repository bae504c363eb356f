"""Run independent calls side by side, in one process per device.

concurrent.futures starts the processes and carries arguments, results and errors. Each process has
an executor of its own, because an executor loses all its calls if one of its processes is killed.
This module imports nothing heavy, so that a process can set its threads before torch is loaded.
"""

import contextlib
import contextvars
import logging
import math
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_EXCEPTION,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
from filelock import FileLock
from rich.console import Console

from kdcli.engine import processes
from kdcli.engine.processes import StopRequest, stop_requests
from kdcli.engine.progress import Progress
from kdcli.errors import Interrupted, MachineError, Stopped
from kdcli.manifest import continue_manifest, recorded_directories
from kdcli.messages import log
from kdcli.recipe.sections import RunOptions

T = TypeVar("T")
ATTEMPTS = 2
"""The number of times that a call is tried if its process is killed."""


@dataclass(frozen=True)
class Worker:
    """A process of a pool.

    Attributes:
        device: The device of its calls.
        executor: Sends calls to the process.
        process: The process.
    """

    device: str
    executor: ProcessPoolExecutor
    process: psutil.Process


class Pool:
    """The processes of a run that make several models at once.

    Args:
        devices: The device of each process.
        threads: The number of threads of each process.
        stop: The request of the user to stop.
        context: Makes the context in which a process runs its calls. It must be possible to pickle.
    """

    def __init__(
        self,
        devices: Sequence[str],
        threads: int,
        stop: StopRequest,
        context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.threads, self.stop, self.context = threads, stop, context
        self.size = len(devices)
        self.ending: set[object] = set()
        self.free: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.idle: dict[str, list[Worker]] = {device: [] for device in devices}
        self.busy: set[Worker] = set()
        self.shared = tempfile.TemporaryDirectory(prefix="kdcli-pool-")
        for device in devices:
            self.free.put(device)

    @property
    def ends(self) -> bool:
        """Whether a group of tasks is being stopped, so that no call begins."""
        return bool(self.ending)

    def side_by_side(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run tasks in threads. Each may use `call`. Return their results, in the same order.

        If a task fails, or the user stops the run, the calls of the other tasks are stopped as by
        SIGTERM. A second Ctrl-C kills their processes. A task may run tasks of its own in this way.
        """
        with ThreadPoolExecutor(len(tasks)) as threads:
            futures = [threads.submit(contextvars.copy_context().run, task) for task in tasks]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                failed = [one for one in futures if one.done() and one.exception() is not None]
                for one in failed:
                    one.result()
                return [one.result() for one in futures]
            except BaseException:
                self._end(futures)
                raise

    def _end(self, futures: Sequence[Future[T]]) -> None:
        # A group inside another one may end first, while the other is still being stopped.
        mark = object()
        self.ending.add(mark)
        try:
            self._each_busy(psutil.Process.terminate)
            self._resume_all()
            wait(futures)
        except KeyboardInterrupt:
            self._each_busy(psutil.Process.kill)
            wait(futures)
            raise
        finally:
            self.ending.discard(mark)

    def _resume_all(self) -> None:
        """Resume the processes that a measuring process suspended and can no longer resume.

        A suspended process sees no signal and ends no call.
        """
        for child in psutil.Process().children():
            if (Path(self.shared.name) / str(child.pid)).exists():
                _resume(child)

    def _each_busy(self, act: Callable[[psutil.Process], None]) -> None:
        for worker in list(self.busy):
            with contextlib.suppress(psutil.NoSuchProcess):
                act(worker.process)

    def call(
        self,
        name: str,
        function: Callable[[RunOptions], object],
        options: RunOptions,
        seconds: float = math.inf,
    ) -> None:
        """Call a function in the next free process, with its device, and wait for it.

        Args:
            name: The name of the call, which each of its log lines begins with.
            function: The function, which must be possible to pickle. Its result is dropped.
            options: Its argument, apart from the device.
            seconds: The time after which a training writes a checkpoint and stops.

        Raises:
            Stopped: The user stopped the run, or the time is up.
            MachineError: The process was killed, and so was the one that replaced it.
            KdcliError: The function raised it.
        """
        device = self.free.get()
        try:
            for attempt in range(ATTEMPTS):
                if self.ends or self.stop.signalled:
                    raise Stopped(f"stopped before {name}")
                began = time.monotonic()
                try:
                    with self._worker(device) as worker:
                        own = replace(options, device=device)
                        call = partial(_call, name, function, own, seconds, recorded_directories())
                        worker.executor.submit(call).result()
                    return
                except (KeyboardInterrupt, Interrupted):
                    raise Stopped(f"stopped in {name}") from None
                except BrokenProcessPool:
                    self._resume_all()
                    seconds -= time.monotonic() - began
                    if attempt + 1 < ATTEMPTS and not self.stop.signalled and not self.ends:
                        log(f"{name}: its process was killed; another one continues it")
            if self.ends or self.stop.signalled:
                raise Stopped(f"stopped in {name}")
            raise MachineError(
                f"the process of {name} was killed {ATTEMPTS} times, often for lack of memory",
                "use fewer --processes, and continue with --resume",
            )
        finally:
            self.free.put(device)

    @contextlib.contextmanager
    def _worker(self, device: str) -> Iterator[Worker]:
        """Take an idle process of a device, or start one. It is kept unless it was killed."""
        idle = self.idle[device]
        worker = idle.pop() if idle else self._start(device)
        self.busy.add(worker)
        try:
            if self.ends:
                # `_end` may not have seen this process.
                raise Stopped("stopped before a call")
            yield worker
        except BrokenProcessPool:
            worker.executor.shutdown()
            raise
        except BaseException:
            idle.append(worker)
            raise
        else:
            idle.append(worker)
        finally:
            self.busy.discard(worker)

    def _start(self, device: str) -> Worker:
        executor = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            _begin,
            (self.threads, Path(self.shared.name), processes.prepare_child, self.context),
        )
        return Worker(device, executor, psutil.Process(executor.submit(os.getpid).result()))

    def close(self) -> None:
        """End all processes."""
        self._resume_all()
        for workers in self.idle.values():
            for worker in workers:
                worker.executor.shutdown()
            workers.clear()
        self.shared.cleanup()


_shared: Path | None = None
"""The directory of this process's pool, with a file for each process; None in other processes."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Suspend the other processes of this one's pool, so that they do not slow a measurement."""
    parent = multiprocessing.parent_process()
    if _shared is None or parent is None:
        yield
        return
    with FileLock(_shared / "undisturbed.lock"), contextlib.ExitStack() as resumed:
        # Not `os.getppid()`, which is another program once the parent was killed.
        for other in psutil.Process(parent.pid).children():
            # The program that opened the pool may have started other processes too.
            if other.pid != os.getpid() and (_shared / str(other.pid)).exists():
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.suspend()
                    resumed.callback(_resume, other)
        yield


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def _begin(
    threads: int,
    shared: Path,
    prepare: Callable[[], object],
    context: Callable[[], AbstractContextManager[None]],
) -> None:
    """Prepare a process for its calls."""
    global _shared
    _shared = shared
    (shared / str(os.getpid())).touch()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if hasattr(os, "setpgrp"):
        # Ctrl-C reaches the first process alone, which then stops the others as it decides.
        os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Several live bars cannot share a terminal.
    Progress.console = Console(stderr=True, highlight=False, force_terminal=False)
    Progress.attach(is_command=True)
    prepare()
    _LASTING.enter_context(context())


_LASTING = contextlib.ExitStack()
"""The contexts of a process of a pool. They last as long as it does."""


def _end_with_parent() -> None:
    """End this process after its parent was killed. A training first writes a checkpoint."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _call(
    name: str,
    function: Callable[[RunOptions], object],
    options: RunOptions,
    seconds: float,
    recorded: Iterable[Path],
) -> None:
    """Call a function in this process of a pool. The run's manifests list its files."""
    for folder in recorded:
        continue_manifest(folder)
    Progress.handler.setFormatter(logging.Formatter(f"[{name}] %(message)s"))
    parent = multiprocessing.parent_process()
    try:
        with stop_requests(at_once=True) as stop:
            stop.deadline = time.monotonic() + seconds
            function(options)
    finally:
        if parent is not None and not parent.is_alive():
            os._exit(Stopped.exit_code)
