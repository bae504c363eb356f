"""A command of kdcli in a forked process, which may be killed, or find the disk full, at its n-th
system call."""

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdcli.errors import KdcliError
from tools.faults.campaign import MOST_MEGABYTES, MOST_SECONDS, Fault, brief

PROMISED = {0} | {error.exit_code for error in KdcliError.__subclasses__()} - {1}
CALLS = ("fsync", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "open")
GROW = ("fsync", "mkdir", "open")  # what a full disk refuses


@dataclass(frozen=True)
class Done:
    """How a command ended; `seconds` are of computing."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    megabytes: float

    def check(self, *codes: int) -> Done:
        """Raise a Fault: another exit code, a traceback, no or more than one message, too long or
        too large."""
        shown = self.stderr.strip()[-1200:]
        if "Traceback" in self.stderr or "Traceback" in self.stdout:
            raise Fault(
                f"traceback, exit {self.code}: {brief(shown.splitlines()[-1], self.stderr)}"
            )
        if self.code not in (codes or PROMISED):
            raise Fault(
                f"exit {self.code}, not {' or '.join(map(str, codes)) or 'a promised one'}: {shown}"
            )
        if self.code and not self.messages:
            raise Fault(f"exit {self.code} without a message: {shown}")
        if self.messages > 1:
            raise Fault(f"{self.messages} messages: {shown}")
        if len(self.stderr) > 20_000:
            raise Fault(f"a message of {len(self.stderr):,} characters: {self.stderr[:300]}")
        # What runs may take its time; what is refused may not.
        if (self.code == 2 and self.seconds > MOST_SECONDS) or self.megabytes > MOST_MEGABYTES:
            raise Fault(f"{self.seconds:.1f} s of computing, {self.megabytes:.0f} MB")
        return self

    @property
    def messages(self) -> int:
        # Typer frames its own in a box.
        lines = self.stderr.splitlines()
        return sum(line.startswith("error:") for line in lines) + sum(
            "─ Error ─" in line for line in lines
        )


@dataclass(frozen=True)
class At:
    """What happens at the `number`-th watched call: SIGKILL before or after it, or a disk that is
    full from then on."""

    number: int
    how: str  # before, after or full


class Command:
    """A running command; its outputs go to files in `folder`, its working directory is `cwd` or
    `folder`."""

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        at: At | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = folder / f"said-{time.monotonic_ns()}"
        self._began = time.monotonic()
        self._done: Done | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(self.name, [str(a) for a in arguments], at, cwd or folder, environment or {})

    def poll(self) -> Done | None:
        """How it ended, or None."""
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
        """How it ended. Raises Fault: it has not by then, counted from its start."""
        while (done := self.poll()) is None:
            if time.monotonic() - self._began > seconds:
                os.kill(self.pid, signal.SIGKILL)
                raise Fault(
                    f"still running after {seconds:g} s: "
                    f"{self.name.with_suffix('.err').read_text()[-500:]}"
                )
            time.sleep(0.003)
        return done

    def calls(self) -> list[str]:
        """The watched calls that it made."""
        return list(json.loads(self.name.with_suffix(".calls").read_text("utf-8")))


def kdcli(
    folder: Path,
    *arguments: object,
    at: At | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run a command to its end."""
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
        except BaseException:  # noqa: BLE001 - shown as the interpreter would show it
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if calls is not None:
            name.with_suffix(".calls").write_text(json.dumps(list(calls)), "utf-8")
    finally:
        os._exit(code)


def _watch(folder: Path, at: At) -> list[str]:
    """Count the calls that change what is below a folder, and act at one of them."""
    calls: list[str] = []
    whole_open, descriptor = io.open, os.open

    def below(path: Any, within: int | None = None) -> bool:
        if isinstance(path, int):
            within, path = path, ""
        base = Path.cwd() if within is None else Path(os.readlink(f"/proc/self/fd/{within}"))  # noqa: PTH115
        return (base / os.fsdecode(path)).is_relative_to(folder) and not Path(
            os.fsdecode(path)
        ).name.startswith("said")

    def watched(name: str, call: Any, counts: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            if not arguments or not counts(*arguments, **named):
                return call(*arguments, **named)
            if not below(arguments[0], named.get("dir_fd", named.get("src_dir_fd"))):
                return call(*arguments, **named)
            calls.append(name)
            now = len(calls) - 1 == at.number
            if at.how == "full" and len(calls) > at.number and name in GROW:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
            if now and at.how == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if now and at.how == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return called

    for name in CALLS[:-1]:
        setattr(os, name, watched(name, getattr(os, name), lambda *a, **k: True))
    os.open = watched("open", descriptor, lambda path, flags, *a, **k: flags & os.O_CREAT)
    opened = watched(
        "open",
        whole_open,
        lambda path, mode="r", *a, **k: not isinstance(path, int) and set(mode) & set("wax+"),
    )
    io.open = builtins.open = opened
    return calls
