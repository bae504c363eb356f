"""Run cases in forked processes under limits of time and memory, and tabulate the results."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_SECONDS, MAX_MEGABYTES = 8.0, 2048.0
"""Processor time and resident memory of a command. For a case that reads a file without a command,
the memory is the amount that the case adds to its process."""


class Fault(Exception):
    """A behaviour of the program that is not allowed. The message describes it."""


@dataclass(frozen=True)
class Case:
    """One case of a kind.

    Attributes:
        number: Number of the case within its kind.
        rng: Random generator that depends on the seed, the kind and the number.
        folder: The case's own directory.
        material: Models and data that no case changes.
    """

    number: int
    rng: random.Random
    folder: Path
    material: Path


@dataclass(frozen=True)
class Kind:
    """A kind of case.

    Attributes:
        name: Name of the kind on the command line.
        count: Number of cases.
        run: Runs a case. Raises `Fault` if it fails.
        chunk: Number of cases that one process runs.
        wall: Maximum seconds for one case on an idle machine.
    """

    name: str
    count: int
    run: Callable[[Case], None]
    chunk: int = 1
    wall: float = 60.0


@dataclass(frozen=True)
class Verdict:
    """The result of a chunk of cases.

    Attributes:
        kind: Name of the kind.
        first, last: Numbers of the first and the last case.
        seconds: Processor time of the slowest case.
        megabytes: The largest resident memory of the process.
        failures: Number and message of each failed case.
    """

    kind: str
    first: int
    last: int
    seconds: float
    megabytes: float
    failures: list[tuple[int, str]]


class Campaign:
    """The cases of one seed.

    Args:
        kinds: The kinds of cases.
        seed: The seed.
        material: The directory that all cases share.
        results: The file that keeps the verdicts. Cases that it contains do not run again.
    """

    def __init__(self, kinds: Sequence[Kind], seed: int, material: Path, results: Path) -> None:
        self.kinds = {kind.name: kind for kind in kinds}
        self.seed, self.material, self.results = seed, material, results
        self.verdicts = [Verdict(**json.loads(line)) for line in _whole_lines(results)]
        self._megabytes_at_start: float | None = None

    def run(self, minutes: float, jobs: int) -> None:
        """Run the remaining cases until the time is up, with `jobs` processes at a time."""
        until = time.monotonic() + 60 * minutes
        left = self._left()
        running: list[_Process] = []
        shown: set[str] = set()
        self.results.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.results.open("a", encoding="utf-8") as file:
                while running or (left and time.monotonic() < until):
                    while left and len(running) < jobs and time.monotonic() < until:
                        running.append(_Process(self, *left.pop(0)))
                    for process in [p for p in running if p.ended()]:
                        running.remove(process)
                        verdict = process.verdict()
                        if verdict.last < process.last:
                            left.insert(0, (process.kind, verdict.last + 1, process.last))
                        self.verdicts.append(verdict)
                        file.write(json.dumps(asdict(verdict)) + "\n")
                        file.flush()
                        for number, message in verdict.failures:
                            # Show only the first of several similar failures.
                            group = _group_of(process.kind.name, message)
                            if group not in shown:
                                shown.add(group)
                                text = " ".join(message.split())[:400]
                                line = f"{process.kind.name}:{number}  {text}"
                                print(line, file=sys.stderr, flush=True)
                    time.sleep(0.005)
        finally:
            for process in running:
                process.kill()

    def _left(self) -> list[tuple[Kind, int, int]]:
        """Return the kind, first and last number of every chunk to run.

        The order gives all kinds the same share of their cases at any time.
        """
        chunks = []
        for kind in self.kinds.values():
            done = {
                n for v in self.verdicts if v.kind == kind.name for n in range(v.first, v.last + 1)
            }
            numbers = [n for n in range(kind.count) if n not in done]
            parts: list[list[int]] = []
            for n in numbers:
                if not parts or n != parts[-1][-1] + 1 or len(parts[-1]) == kind.chunk:
                    parts.append([])
                parts[-1].append(n)
            chunks += [((part[0] + 1) / kind.count, kind, part[0], part[-1]) for part in parts]
        return [chunk[1:] for chunk in sorted(chunks, key=lambda chunk: chunk[0])]

    def failures(self) -> list[list[tuple[str, str]]]:
        """Return the failures in groups of similar ones, with the largest group first.

        Each failure is `KIND:NUMBER` and its message.
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        for verdict in self.verdicts:
            kind = self.kinds.get(verdict.kind)
            for number, message in verdict.failures if kind else ():
                if kind:
                    group = groups.setdefault(_group_of(kind.name, message), [])
                    group.append((f"{kind.name}:{number}", message))
        return sorted(groups.values(), key=len, reverse=True)

    def table(self) -> str:
        """Return a table with the counts, the longest time and the most memory of each kind."""
        rows: list[tuple[str, ...]] = [
            ("kind", "cases", "of", "passed", "failed", "worst s", "worst MB")
        ]
        for kind in self.kinds.values():
            own = [v for v in self.verdicts if v.kind == kind.name]
            cases = sum(v.last - v.first + 1 for v in own)
            failed = sum(len(v.failures) for v in own)
            seconds = max((v.seconds for v in own), default=0)
            megabytes = max((v.megabytes for v in own), default=0)
            counts = [f"{n:,}" for n in (cases, kind.count, cases - failed, failed)]
            rows.append((kind.name, *counts, f"{seconds:.2f}", f"{megabytes:.0f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(w) if not i else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )

    def run_case(self, kind: Kind, number: int, folder: Path) -> float:
        """Run one case in this process.

        Returns:
            The processor time of the case and its commands, in seconds.

        Raises:
            Fault: The case failed, or it took too much time or memory.
        """
        rng = random.Random(f"{self.seed} {kind.name} {number}")
        case = Case(number, rng, folder, self.material)
        began, megabytes_before = time.process_time(), _max_megabytes()
        commands_before = _seconds_of_commands()
        # A forked process starts with its parent's pages, so only the growth belongs to a case.
        if self._megabytes_at_start is None:
            self._megabytes_at_start = megabytes_before
        try:
            kind.run(case)
        except (Fault, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise Fault(
                brief(f"{type(error).__name__}: {error}", traceback.format_exc())
            ) from error
        seconds = time.process_time() - began
        if seconds > MAX_SECONDS:
            raise Fault(f"{seconds:.1f} s of processor time")
        growth = _max_megabytes() - self._megabytes_at_start
        # The maximum never decreases, so an earlier case may already have exceeded the limit.
        if megabytes_before - self._megabytes_at_start <= MAX_MEGABYTES < growth:
            raise Fault(f"{growth:.0f} MB")
        return seconds + _seconds_of_commands() - commands_before


class _Process:
    """A forked process that runs a chunk of cases, in a process group of its own."""

    def __init__(self, campaign: Campaign, kind: Kind, first: int, last: int) -> None:
        self.kind, self.first, self.last = kind, first, last
        self.folder = Path(tempfile.mkdtemp(prefix="kdcli-faults-"))
        self._results, self._size = self.folder / "verdicts", 0
        self._results.touch()
        self._last_change = time.monotonic()
        self._is_late = False
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            self._run(campaign)

    def _run(self, campaign: Campaign) -> None:
        code = 1
        try:
            with (self.folder / "output").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            # This limits the address space, so that a request for 100 GB fails immediately.
            limits = (_address_space() + (3 << 30), resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            with self._results.open("a", encoding="utf-8") as results:
                for number in range(self.first, self.last + 1):
                    folder, message, seconds = self.folder / "case", None, 0.0
                    folder.mkdir()
                    try:
                        seconds = campaign.run_case(self.kind, number, folder)
                    except Fault as fault:
                        # Shorten long repetitions of one character.
                        message = re.sub(r"(.)\1{9,}", r"\1\1\1...", str(fault))[:2000]
                    os.chdir(self.folder)
                    unmount_all(folder)
                    shutil.rmtree(folder)
                    results.write(json.dumps([number, seconds, message]) + "\n")
                    results.flush()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reports it as a failure of this case
            traceback.print_exc()
        finally:
            os._exit(code)

    def ended(self) -> bool:
        """Whether the process has ended. Kill it if a case takes longer than its kind allows."""
        size = self._results.stat().st_size
        if size != self._size:
            self._size, self._last_change = size, time.monotonic()
        if time.monotonic() - self._last_change > self.kind.wall * patience():
            self._is_late = True
            self.kill(keep=True)
        pid, self.status, self.used = os.wait4(self.pid, os.WNOHANG)
        return pid != 0

    def kill(self, *, keep: bool = False) -> None:
        """Kill the process group and, unless `keep` is set, delete its directory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not keep:
            unmount_all(self.folder / "case")
            shutil.rmtree(self.folder, ignore_errors=True)

    def verdict(self) -> Verdict:
        """Return the results after the process has ended, and delete its directory.

        If the process ended early, the last case of the verdict is the one that it was running.
        """
        results = [json.loads(line) for line in _whole_lines(self._results)]
        file = self.folder / "output"
        output = file.read_text("utf-8", "replace")[-300:] if file.exists() else ""
        # Processes that a case started may still be running.
        self.kill()
        failures = [(number, message) for number, _, message in results if message]
        last = results[-1][0] if results else self.first - 1
        if last < self.last:
            last += 1
            if self._is_late:
                reason = f"no answer in {self.kind.wall:g} s"
            else:
                reason = f"ended with status {self.status}"
            failures.append((last, f"{reason} {output}".strip()))
        seconds = max((seconds for _, seconds, _ in results), default=0.0)
        megabytes = self.used.ru_maxrss / 1024
        return Verdict(self.kind.name, self.first, last, seconds, megabytes, failures)


def _group_of(kind: str, message: str) -> str:
    """Return a text that similar failures share: the kind, and the place or end of the message."""
    place = re.search(r"[\w/]+\.py:\d+\)$", message)
    end = place[0] if place else re.sub(r"[^a-z ]", "", message[-100:])
    return f"{kind} {message.split(':')[0]} {end}"


def brief(error: str, trace: str) -> str:
    """Shorten an error and add the last line of kdcli in its traceback."""
    # Relative to the repository, because the repository's folder may also be called `kdcli`.
    files = [
        (path.relative_to(ROOT), line)
        for name, line in re.findall(r'"([^"]+\.py)", line (\d+)', trace)
        if (path := Path(name).resolve()).is_relative_to(ROOT)
    ]
    places = [
        f"{path}:{line}"
        for folder in ("tools", "kdcli")
        for path, line in files
        if path.parts[0] == folder
    ]
    return f"{' '.join(error.split())[:300]} ({places[-1] if places else 'elsewhere'})"


def patience() -> float:
    """Return how many times longer than its limit a case may take while the machine is busy."""
    return max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def unmount_all(folder: Path) -> None:
    """Unmount the small disk of a case, if it has one."""
    if os.path.ismount(folder / "disk"):
        os.spawnlp(os.P_WAIT, "umount", "umount", "-l", str(folder / "disk"))


def _max_megabytes() -> float:
    """Return the largest resident memory so far of this process and its ended children."""
    both = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return max(resource.getrusage(who).ru_maxrss for who in both) / 1024


def _seconds_of_commands() -> float:
    """Return the processor time of this process's ended children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _whole_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, without a last line that is only partly written."""
    if path.exists():
        yield from path.read_text("utf-8").split("\n")[:-1]
