"""Processes, forked from one that has imported what commands need: of a short one that is most of
its time."""

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from kdcli.deploy import latency, worker
from kdcli.deploy.old_machines import measure_encoders
from kdcli.engine.peers import peers

SERVER = multiprocessing.get_context("forkserver")
VERBS = ("cotrain", "distill", "evaluate", "finetune", "prune")
PRELOADED = [*(f"kdcli.verbs.{verb}.run" for verb in VERBS), worker.__name__]
SERVER.set_forkserver_preload([*PRELOADED, "transformers.models.bert.modeling_bert"])


class Forked:
    """A function running in a process of its own, as far as tests need of it like
    `subprocess.Popen`."""

    def __init__(self, target: Callable[..., None], *arguments: object, **environment: str) -> None:
        """Start it; `environment` is added to this process's."""
        self._folder = tempfile.TemporaryDirectory(prefix="kdcli-said-")
        self._said = Path(self._folder.name)
        # Sums are only repeated to the bit by as many threads.
        how = self._said, os.environ | environment, torch.get_num_threads()
        self._process = SERVER.Process(target=_run, args=(how, target, arguments))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Exit code, less than 0 for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def kill(self, sent: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, sent)

    def first_line(self) -> str:
        """What it says first on stdout, once it has."""
        said = self._said / "stdout"
        while not (said.exists() and "\n" in said.read_text("utf-8")):
            assert self.returncode is None, self._read()
            time.sleep(0.01)
        return self._read()[0].splitlines()[0]

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for its end; what it said on stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise TimeoutError(f"still running after {timeout} s: {self._read()}")
        return self._read()

    def _read(self) -> tuple[str, str]:
        stdout, stderr = ((self._said / name).read_text("utf-8") for name in ("stdout", "stderr"))
        return stdout, stderr


class _Asked(io.StringIO):
    """What a worker is asked, complete when it is closed."""

    def close(self) -> None:
        self.request = self.getvalue()
        super().close()


class Worker:
    """The latency worker, as far as `kdcli.deploy.latency` needs of it like `subprocess.Popen`."""

    def __init__(self, command: list[str], *, stderr: io.TextIOBase, **how: object) -> None:
        assert command[-1] == worker.__name__
        self.stdin, self._stderr = _Asked(), stderr

    @property
    def stdout(self) -> Iterator[str]:
        """Its answers, once it has ended."""
        self._process = Forked(_serve, self.stdin.request)
        stdout, stderr = self._process.communicate()
        self._stderr.write(stderr)
        yield from stdout.splitlines()

    def wait(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()


def workers_are_forked(patch: pytest.MonkeyPatch) -> None:
    """Latency is measured by forked workers, not by real ones."""
    # The server imports modules also from its current directory, which a test may change.
    ensure_running()
    patch.setattr(latency, "subprocess", SimpleNamespace(Popen=Worker, PIPE=subprocess.PIPE))


def _serve(request: str) -> None:
    sys.stdin = io.StringIO(request)
    with pytest.MonkeyPatch.context() as patch:
        measured_quickly(patch)
        worker.main()


def measured_quickly(patch: pytest.MonkeyPatch) -> None:
    """Warm up by runs alone, not for a second each, and measure once even if times are unstable."""
    patch.setattr(measure_encoders, "WARM_SECONDS", 0.0)
    patch.setattr(measure_encoders, "MAX_MEASUREMENTS", 1)


def script(file: Path, *arguments: object) -> Forked:
    """A Python file as `python FILE ARGUMENTS` in its folder runs it."""
    return Forked(_script, file, [str(a) for a in arguments])


def _script(file: Path, arguments: list[str]) -> None:
    os.chdir(file.parent)
    # A shell that started the tests in the background may have had SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [str(file), *arguments]
    runpy.run_path(str(file), run_name="__main__")


def _run(
    how: tuple[Path, dict[str, str], int],
    target: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    said, environment, threads = how
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (said / name).open("w") as file:
            os.dup2(file.fileno(), number)
    try:
        target(*arguments)
    finally:
        # As at the end of an interpreter.
        atexit._run_exitfuncs()


def in_ranks(
    count: int, work: Callable[[], dict[str, torch.Tensor]], ends: Sequence[int] = ()
) -> list[dict[str, torch.Tensor]]:
    """What `work` returns in each of several gloo processes, forked from this one.

    Nothing is returned if they are to fail, with the codes `ends`.
    """
    place = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    # A fork has none of the threads that its parent computed with, and accelerate asks for as many
    # as there are cores.
    place |= {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.safetensors" for rank in range(count)]
        children = [
            _rank(file, place | {"RANK": str(n), "LOCAL_RANK": str(n)}, work)
            for n, file in enumerate(files)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == (list(ends) or [0] * count)
        return [] if ends else [load_file(file) for file in files]


def _rank(
    file: Path, environment: dict[str, str], work: Callable[[], dict[str, torch.Tensor]]
) -> int:
    if child := os.fork():
        return child
    try:
        os.environ.update(environment)
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        Accelerator(cpu=True)
        save_file({name: tensor.contiguous() for name, tensor in work().items()}, file)
        torch.distributed.destroy_process_group()
        if (others := peers()) is not None:
            others._leave()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(1)


class Child:
    """A fork of this process, as far as tests need of it like `subprocess.Popen`.

    It starts at once, but inherits this process's threads and random numbers, which `Forked` does
    not.
    """

    def __init__(self, work: Callable[[], object], env: Mapping[str, str] = os.environ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _work_and_exit(work, dict(env))

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _work_and_exit(work: Callable[[], object], env: dict[str, str]) -> None:
    code = 1
    try:
        atexit._clear()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.environ.clear()
        os.environ.update(env)
        AcceleratorState._reset_state(reset_partial_state=True)
        work()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        # As at the end of an interpreter.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_port() -> str:
    """A port of this machine that nothing uses yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def killed(after: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that dies at its n-th change of the file system; False: it came to its
    end."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        return code == 9
    calls = 0
    for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
        whole = getattr(os, name)

        def counted(*args: Any, whole: Callable[..., Any] = whole, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == after:
                os._exit(9)
            return whole(*args, **kwargs)

        setattr(os, name, counted)
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)
