"""Run a kdcli command in a forked process; kill it, or fill its disk, at its n-th system call."""

from __future__ import annotations

import atexit
import builtins
import errno
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kdcli.errors import KdcliError
from tools.faults.campaign import MAX_MEGABYTES, MAX_SECONDS, Fault, brief, patience

EXIT_CODES = {0} | {error.exit_code for error in KdcliError.__subclasses__()} - {1}
"""The documented exit codes, without 1, which means an unexpected error."""
CALLS = ("fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "open")
"""The system calls that are watched."""
NEED_SPACE = ("fsync", "mkdir", "open")
"""The watched calls that fail on a full disk."""
OUTPUT = "output-of-command"
"""How the names of the files with a command's output begin."""
T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """The result of a command.

    Attributes:
        code: The exit code, or the negative number of the signal that killed the command.
        stdout, stderr: The output.
        seconds: Processor time.
        megabytes: The largest resident memory.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    megabytes: float

    def check(self, *codes: int) -> Done:
        """Check that the command ended properly.

        Args:
            codes: The allowed exit codes; by default all documented codes.

        Raises:
            Fault: Another exit code, a traceback, an error without exactly one message, or too much
                time or memory.
        """
        shown = self.stderr.strip()[-1200:]
        if "Traceback" in self.stderr or "Traceback" in self.stdout:
            raise Fault(
                f"traceback, exit {self.code}: {brief(shown.splitlines()[-1], self.stderr)}"
            )
        if self.code not in (codes or EXIT_CODES):
            allowed = " or ".join(map(str, codes)) or "a documented code"
            raise Fault(f"exit {self.code}, not {allowed}: {shown}")
        if self.code and not self.messages:
            raise Fault(f"exit {self.code} without a message: {shown}")
        if self.messages > 1:
            raise Fault(f"{self.messages} messages: {shown}")
        if len(self.stderr) > 20_000:
            raise Fault(f"a message of {len(self.stderr):,} characters: {self.stderr[:300]}")
        # A run may take long, but a usage error must be reported soon.
        if (self.code == 2 and self.seconds > MAX_SECONDS) or self.megabytes > MAX_MEGABYTES:
            raise Fault(f"{self.seconds:.1f} s of processor time, {self.megabytes:.0f} MB")
        return self

    @property
    def messages(self) -> int:
        """Number of error messages."""
        # Typer prints its own messages in a box.
        lines = self.stderr.splitlines()
        return sum(line.startswith("error:") for line in lines) + sum(
            "─ Error ─" in line for line in lines
        )


@dataclass(frozen=True)
class At:
    """An event at one of the watched calls.

    Attributes:
        number: Number of the call, from 0. A negative number only counts the calls.
        event: `before` or `after` to kill the process there, `full` for a disk that is full from
            this call on.
    """

    number: int
    event: str


class Command:
    """A running command.

    Args:
        folder: Where the output is written. It is also the default working directory.
        arguments: The command line.
        at: An event at a system call; None does not watch the calls.
        cwd: The working directory.
        environment: Variables to set.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        at: At | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = folder / f"{OUTPUT}-{time.monotonic_ns()}"
        self._began = time.monotonic()
        self._done: Done | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(self.name, [str(a) for a in arguments], at, cwd or folder, environment or {})

    def poll(self) -> Done | None:
        """Return the result if the command has ended, otherwise None."""
        if self._done is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                stdout, stderr = (
                    self.name.with_suffix(f".{s}").read_text("utf-8", "replace")
                    for s in ("out", "err")
                )
                code = os.waitstatus_to_exitcode(status)
                self._done = Done(
                    code, stdout, stderr, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
                )
        return self._done

    def wait(self, seconds: float = 55.0) -> Done:
        """Wait for the result, on an idle machine at most `seconds` after the command's start.

        Raises:
            Fault: The command is still running. It is killed.
        """
        while (done := self.poll()) is None:
            if time.monotonic() - self._began > seconds * patience():
                os.kill(self.pid, signal.SIGKILL)
                raise Fault(
                    f"still running after {seconds:g} s: "
                    f"{self.name.with_suffix('.err').read_text()[-500:]}"
                )
            time.sleep(0.003)
        return done

    def calls(self) -> list[str]:
        """Return the names of the watched calls that the command made."""
        return list(json.loads(self.name.with_suffix(".calls").read_text("utf-8")))


def kdcli(
    folder: Path,
    *arguments: object,
    at: At | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run a command and return its result. Takes the same arguments as `Command`."""
    return Command(folder, *arguments, at=at, cwd=cwd, environment=environment).wait()


def _run(
    name: Path, arguments: list[str], at: At | None, cwd: Path, environment: Mapping[str, str]
) -> None:
    code, calls = 1, None
    try:
        for number, ending in ((1, "out"), (2, "err")):
            with name.with_suffix(f".{ending}").open("w") as file:
                os.dup2(file.fileno(), number)
        os.environ.update(environment)
        os.chdir(cwd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        calls = _watch(cwd, at) if at else None
        from kdcli.cli import main

        sys.argv = ["kdcli", *arguments]
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # noqa: BLE001 - print the traceback, as the interpreter does
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if calls is not None:
            name.with_suffix(".calls").write_text(json.dumps(list(calls)), "utf-8")
    finally:
        os._exit(code)


def _watch(folder: Path, at: At) -> list[str]:
    """Count the calls that change files below a folder, and cause an event at one of them.

    Returns:
        The names of the calls, a list that grows while the command runs.
    """
    calls: list[str] = []
    open_file, open_descriptor = io.open, os.open

    def is_below(path: Any, directory: int | None = None) -> bool:
        """Whether a path, relative to an open directory, is a file of the command."""
        if isinstance(path, int):
            directory, path = path, ""
        base = Path.cwd()
        if directory is not None:
            base = Path(os.readlink(f"/proc/self/fd/{directory}"))  # noqa: PTH115
        full = base / os.fsdecode(path)
        is_output = Path(os.fsdecode(path)).name.startswith(OUTPUT)
        return full.is_relative_to(folder) and not is_output

    def watched(
        name: str, call: Callable[..., T], writes: Callable[..., object]
    ) -> Callable[..., T]:
        """Wrap a call. `writes` decides from its arguments whether it can change files."""

        def watching(*arguments: Any, **named: Any) -> T:
            if not arguments or not writes(*arguments, **named):
                return call(*arguments, **named)
            if not is_below(arguments[0], named.get("dir_fd", named.get("src_dir_fd"))):
                return call(*arguments, **named)
            calls.append(name)
            is_now = len(calls) - 1 == at.number
            if at.event == "full" and len(calls) > at.number and name in NEED_SPACE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
            if is_now and at.event == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if is_now and at.event == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return watching

    def always(*arguments: object, **named: object) -> bool:
        return True

    def creates(path: object, flags: int, *arguments: object, **named: object) -> bool:
        return bool(flags & os.O_CREAT)

    def opens_for_writing(
        path: object, mode: str = "r", *arguments: object, **named: object
    ) -> bool:
        return not isinstance(path, int) and bool(set(mode) & set("wax+"))

    for name in CALLS[:-1]:
        setattr(os, name, watched(name, getattr(os, name), always))
    os.open = watched("open", open_descriptor, creates)
    open_and_watch: Any = watched("open", open_file, opens_for_writing)
    io.open = builtins.open = open_and_watch
    return calls
