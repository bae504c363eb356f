"""Cases of every kind in forked processes under limits of time and memory, and a table of what came
out."""

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
MOST_SECONDS, MOST_MEGABYTES = 8.0, 2048.0
"""Seconds of computing; resident memory of one command, or that one file read adds to its process.
"""


class Fault(Exception):
    """What the program did and must not do."""


@dataclass(frozen=True)
class Case:
    """One case; `folder` is its own, `material` holds models and data that no case changes."""

    number: int
    rng: random.Random
    folder: Path
    material: Path


@dataclass(frozen=True)
class Kind:
    """Cases of one kind. `run` raises `Fault`. A process runs `chunk` of them; none may last `wall`
    seconds. `open`: what is known to fail, by the number of a case."""

    name: str
    count: int
    run: Callable[[Case], None]
    chunk: int = 1
    wall: float = 60.0
    open: Callable[[int], str | None] = lambda number: None


@dataclass(frozen=True)
class Verdict:
    """What came of the cases `first` to `last` of a kind: a failure is a number with what was
    seen."""

    kind: str
    first: int
    last: int
    seconds: float
    megabytes: float
    failures: list[tuple[int, str]]


class Campaign:
    """The cases of one seed, and the file that keeps their verdicts."""

    def __init__(self, kinds: Sequence[Kind], seed: int, material: Path, results: Path) -> None:
        self.kinds = {kind.name: kind for kind in kinds}
        self.seed, self.material, self.results = seed, material, results
        self.verdicts = [Verdict(**json.loads(line)) for line in _whole_lines(results)]
        self._held: float | None = None

    def run(self, minutes: float, jobs: int) -> None:
        """Run what is left, each kind in its share, until the time is up."""
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
                        for number, seen in verdict.failures:
                            # One of each sort now; the table counts them.
                            if (sort := _alike(process.kind.name, seen)) not in shown:
                                shown.add(sort)
                                line = (
                                    f"{process.kind.name}:{number}  {' '.join(seen.split())[:400]}"
                                )
                                print(line, file=sys.stderr, flush=True)
                    time.sleep(0.005)
        finally:
            for process in running:
                process.kill()

    def _left(self) -> list[tuple[Kind, int, int]]:
        """Kind, first and last number of every chunk to run; the kinds advance together."""
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
        """`kind:number` of the cases that failed and are not known to, and what was seen; alike
        ones together."""
        found: dict[str, list[tuple[str, str]]] = {}
        for verdict in self.verdicts:
            kind = self.kinds.get(verdict.kind)
            for number, seen in verdict.failures if kind else ():
                if kind and not kind.open(number):
                    found.setdefault(_alike(kind.name, seen), []).append(
                        (f"{kind.name}:{number}", seen)
                    )
        return sorted(found.values(), key=len, reverse=True)

    def table(self) -> str:
        """Kind, cases, passed, failed, open, the slowest and the largest."""
        rows: list[tuple[str, ...]] = [
            ("kind", "cases", "of", "passed", "failed", "open", "worst s", "worst MB")
        ]
        for kind in self.kinds.values():
            own = [v for v in self.verdicts if v.kind == kind.name]
            cases = sum(v.last - v.first + 1 for v in own)
            failed = [n for v in own for n, _ in v.failures]
            known = sum(kind.open(n) is not None for n in failed)
            seconds, megabytes = (
                max((getattr(v, key) for v in own), default=0) for key in ("seconds", "megabytes")
            )
            counts = cases, kind.count, cases - len(failed), len(failed) - known, known
            rows.append(
                (
                    kind.name,
                    *(f"{count:,}" for count in counts),
                    f"{seconds:.2f}",
                    f"{megabytes:.0f}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(w) if not i else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )

    def alone(self, kind: Kind, number: int, folder: Path) -> float:
        """Run one case in this process; the seconds of computing it took, commands included. Raises
        Fault."""
        case = Case(
            number, random.Random(f"{self.seed} {kind.name} {number}"), folder, self.material
        )
        began, before, used = (
            time.process_time(),
            _megabytes(),
            resource.getrusage(resource.RUSAGE_CHILDREN),
        )
        # A fork holds its parent's pages but for those of mapped files: only what it adds says
        # something of a case.
        self._held = before if self._held is None else self._held
        commands = used.ru_utime + used.ru_stime
        try:
            kind.run(case)
        except (Fault, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise Fault(
                brief(f"{type(error).__name__}: {error}", traceback.format_exc())
            ) from error
        taken = time.process_time() - began
        if taken > MOST_SECONDS:
            raise Fault(f"{taken:.1f} s of computing")
        if before - self._held <= MOST_MEGABYTES < (added := _megabytes() - self._held):
            raise Fault(f"{added:.0f} MB")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return taken + used.ru_utime + used.ru_stime - commands


class _Process:
    """A forked process, the head of its process group, that runs a chunk of cases."""

    def __init__(self, campaign: Campaign, kind: Kind, first: int, last: int) -> None:
        self.kind, self.first, self.last = kind, first, last
        self.folder = Path(tempfile.mkdtemp(prefix="kdcli-faults-"))
        self._said, self._seen = self.folder / "verdicts", 0
        self._said.touch()
        self._at = time.monotonic()
        self._late = False
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
            # Not a limit of what is resident, but a file that asks for 100 GB asks here.
            most = (_address_space() + (3 << 30), resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, most)
            with self._said.open("a", encoding="utf-8") as said:
                for number in range(self.first, self.last + 1):
                    folder, seen, taken = self.folder / "case", None, 0.0
                    folder.mkdir()
                    try:
                        taken = campaign.alone(self.kind, number, folder)
                    except Fault as fault:
                        # Of a very long word only its beginning is of use.
                        seen = re.sub(r"(.)\1{9,}", r"\1\1\1...", str(fault))[:2000]
                    os.chdir(self.folder)
                    unmounted(folder)
                    shutil.rmtree(folder)
                    said.write(json.dumps([number, taken, seen]) + "\n")
                    said.flush()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reports it as a failure of this case
            traceback.print_exc()
        finally:
            os._exit(code)

    def ended(self) -> bool:
        """True once it has; one that is late is killed."""
        size = self._said.stat().st_size
        if size != self._seen:
            self._seen, self._at = size, time.monotonic()
        if time.monotonic() - self._at > self.kind.wall:
            self._late = True
            self.kill(keep=True)
        pid, self.status, self.used = os.wait4(self.pid, os.WNOHANG)
        return pid != 0

    def kill(self, *, keep: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not keep:
            self._tidy()

    def _tidy(self) -> None:
        unmounted(self.folder / "case")
        shutil.rmtree(self.folder, ignore_errors=True)

    def verdict(self) -> Verdict:
        said = [json.loads(line) for line in _whole_lines(self._said)]
        output = self.folder / "output"
        heard = output.read_text("utf-8", "replace")[-300:] if output.exists() else ""
        # What a case started may outlive it.
        self.kill()
        failures = [(number, seen) for number, _, seen in said if seen]
        last = said[-1][0] if said else self.first - 1
        megabytes = self.used.ru_maxrss / 1024
        if last < self.last:
            last += 1
            how = (
                f"no answer in {self.kind.wall:g} s"
                if self._late
                else f"ended with status {self.status}"
            )
            failures.append((last, f"{how} {heard}".strip()))
        return Verdict(
            self.kind.name,
            self.first,
            last,
            max((s for _, s, _ in said), default=0.0),
            megabytes,
            failures,
        )


def _alike(kind: str, seen: str) -> str:
    """The same for failures of one kind at one place."""
    at = re.search(r"[\w/]+\.py:\d+\)$", seen)
    return f"{kind} {seen.split(':')[0]} {at[0] if at else re.sub(r'[^a-z ]', '', seen[-100:])}"


def brief(error: str, trace: str) -> str:
    """An error in a few words, and the last line of the package that was on the way."""
    # Relative to the repository, because its own folder may be called `kdcli` too.
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


def unmounted(folder: Path) -> None:
    """Detach the small disk of a case, if it has one."""
    if os.path.ismount(folder / "disk"):
        os.spawnlp(os.P_WAIT, "umount", "umount", "-l", str(folder / "disk"))


def _megabytes() -> float:
    """The most that this process and those it waited for ever had in memory."""
    return (
        max(
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        / 1024
    )


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _whole_lines(path: Path) -> Iterator[str]:
    if path.exists():
        yield from path.read_text("utf-8").split("\n")[:-1]
