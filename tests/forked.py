"""Processes of their own, forked from one that has imported what commands need: of a short one that is most of its
time."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *(f"kdcli.commands.{verb}" for verb in ("cotrain", "distill", "evaluate", "finetune", "prune")),
        "transformers.models.bert.modeling_bert",
    ]
)


class Forked:
    """A function running in a process of its own, as far as tests need of it like `subprocess.Popen`."""

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

    def kill(self) -> None:
        """As `kill -9`."""
        self._process.kill()

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


def _run(how: tuple[Path, dict[str, str], int], target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    said, environment, threads = how
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (said / name).open("w") as file:
            os.dup2(file.fileno(), number)
    target(*arguments)
