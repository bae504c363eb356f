"""Commands in processes of their own. They are forked from one that has imported what commands need: of a short
command that is most of its time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        *(f"kdcli.commands.{verb}" for verb in ("cotrain", "distill", "evaluate", "finetune", "prune")),
        "transformers.models.bert.modeling_bert",
    ]
)


class Command:
    """A running `kdcli`, as far as tests need of it like `subprocess.Popen`."""

    def __init__(self, arguments: tuple[object, ...], environment: dict[str, str]) -> None:
        self._said = Path(tempfile.mkdtemp(prefix="kdcli-said-"))
        # Sums are only repeated to the bit by as many threads.
        given = [str(a) for a in arguments], environment, torch.get_num_threads(), self._said
        self._process = FORKING.Process(target=_run, args=given)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Exit code, less than 0 for a signal; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """As `kill -9`."""
        self._process.kill()

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


def process(*arguments: object, **environment: str) -> Command:
    """Run a command in a process of its own."""
    return Command(arguments, os.environ | environment)


def two_ranks(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Run a command as two processes that join by gloo, and end with `code`; what the first said on stdout and stderr.
    The second says nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"ACCELERATE_USE_CPU": "true"}
    ranks = [process(*arguments, **common, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    first, second = (rank.communicate() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [code, code], (first, second)
    assert second == ("", "")
    return first


def killed_at_random(*arguments: object, out: Path, stage: str = ".") -> None:
    """Run a command that writes to `out`, and kill it at one of the first steps of the stage in that directory."""
    killed, cut, log = process(*arguments, "-o", out), int.from_bytes(os.urandom(1)) % 40 + 3, out / stage / "log.jsonl"
    while killed.returncode is None:
        if log.exists() and log.read_text("utf-8").count("\n") > cut:
            killed.kill()
            break
        time.sleep(0.005)
    killed.communicate()
    assert killed.returncode == -9
    assert not (out / stage / "report.json").exists()


def _run(arguments: list[str], environment: dict[str, str], threads: int, said: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (said / name).open("w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["kdcli", *arguments]
    from kdcli.cli import main

    main()
