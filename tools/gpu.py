"""Measure kdcli on a machine with a GPU.

    python -m tools.gpu [--minutes 9] [--device cuda] [--only NAME,NAME] [--again] [--tiny]
                        [--out runs/gpu]

The pieces are tests, benchmarks, distillation, relation kernels, SMP and latency. A call works for
`--minutes`, and the next call continues with the remaining pieces. A piece that fails is recorded
with the last line of its error; `--again` repeats it. Writes DEVICE.json and DEVICE.md, a table for
docs/results.md, and copies both to the directory in the environment variable OUT if it is set.

Requirements: PyTorch with CUDA, the dependencies in pyproject.toml, pytest for the tests, triton
for the kernels, and the repository as the working directory. Nothing is downloaded: weights, rows
and texts are random or part of the package. `--device cpu --tiny` runs the pieces that need no GPU
on small shapes, to test the script.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kdcli.disk import write_atomic
from kdcli.errors import last_message
from tools.gpu_pieces import MACHINE, PIECES, Bench, Piece, Row


@dataclass(frozen=True)
class PieceResult:
    """The result of a piece.

    Attributes:
        rows: Its measurements.
        error: The last line of its error, or None if it succeeded.
        seconds: The time it took.
    """

    rows: list[Row]
    error: str | None
    seconds: float = 0.0


class Record:
    """The results of one device so far. They are written to files after every piece."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / f"{name}.json"
        results = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        self.pieces = {piece: PieceResult(**result) for piece, result in results.items()}

    def add(self, name: str, result: PieceResult) -> None:
        """Add a piece's result and write the files."""
        self.pieces[name] = result
        results = {piece: asdict(each) for piece, each in self.pieces.items()}
        write_atomic(self.file, json.dumps(results, indent=1))
        write_atomic(self.file.with_suffix(".md"), self.table())

    def failed(self, name: str) -> bool:
        """Whether a piece ran and failed."""
        return name in self.pieces and self.pieces[name].error is not None

    def table(self) -> str:
        """Return the results as a table in Markdown."""
        lines = [", ".join(value for _, value in self.pieces[MACHINE].rows) + ":", ""]
        lines += ["| piece | measured | |", "|---|---|---|"]
        for name, result in self.pieces.items():
            rows = result.rows or [("failed", result.error or "")]
            cells = [[name, what, value] for what, value in rows if name != MACHINE]
            lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]
        return "\n".join(lines) + "\n"


def run(pieces: Mapping[str, Piece], record: Record, bench: Bench, minutes: float) -> list[str]:
    """Run pieces one after the other, each in its own process.

    Args:
        pieces: The pieces by name.
        record: Where the results are added.
        bench: The settings of all measurements.
        minutes: The time limit for all pieces together.

    Returns:
        The pieces that remain for the next call.
    """
    end, left = time.monotonic() + 60 * minutes, list(pieces)
    for number, (name, piece) in enumerate(pieces.items()):
        began = time.monotonic()
        result = run_alone(name, piece, bench, end - began)
        if result is None and number:
            break  # This piece only had the rest of the time. The next call starts with it.
        result = result or PieceResult([], f"it takes more than {minutes:g} minutes")
        if name == MACHINE and result.error:
            raise SystemExit(f"error: {result.error}")
        seconds = round(time.monotonic() - began, 1)
        record.add(name, replace(result, seconds=seconds))
        left.remove(name)
        print(f"{name}: {result.error or 'done'} ({seconds} s)", flush=True)
    return left


def run_alone(name: str, piece: Piece, bench: Bench, seconds: float) -> PieceResult | None:
    """Run a piece in a process of its own.

    Returns:
        The result. If the process fails, its error is the last line of its log. None if the piece
        does not finish in time.
    """
    # A forked process already has PyTorch loaded. This process must never use the device, because a
    # fork cannot share its state.
    context, log = multiprocessing.get_context("fork"), bench.folder / f"{name}.log"
    read, write = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(piece, bench, log, write))
    child.start()
    assert child.pid is not None
    write.close()
    try:
        return PieceResult(read.recv(), None) if read.poll(max(0.0, seconds)) else None
    except EOFError:
        child.join()
        message = last_message(log.read_text("utf-8", "replace"))
        return PieceResult([], message or f"exit code {child.exitcode}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # It may not have created its process group yet.
        child.join()


def _answer(piece: Piece, bench: Bench, log: Path, write: Connection) -> None:
    """Run a piece in a forked process and send its rows. Its output goes to a log."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stderr.fileno(), stream)
    write.send(piece(bench))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help=f"pieces, separated by commas: {', '.join(PIECES)}")
    parser.add_argument("--again", action="store_true", help="repeat the pieces that failed")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args(arguments)
    names = [MACHINE, *options.only.split(",")] if options.only else list(PIECES)
    if unknown := set(names) - set(PIECES):
        parser.error(f"unknown pieces {', '.join(sorted(unknown))}; known: {', '.join(PIECES)}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        parser.error(f"unknown device {options.device}; allowed: cpu, cuda, cuda:INDEX")
    record = Record(options.out, f"{options.device.replace(':', '-')}{'-tiny' * options.tiny}")
    bench = Bench(torch.device(options.device), options.tiny, options.out)
    missing = [name for name in names if name not in record.pieces]
    repeated = [name for name in names if options.again and record.failed(name)]
    due = [name for name in names if name in (*missing, *repeated)]
    left = run({name: PIECES[name] for name in due}, record, bench, options.minutes)
    if os.environ.get("OUT"):
        for file in (record.file, record.file.with_suffix(".md")):
            shutil.copy(file, os.environ["OUT"])
    table = record.file.with_suffix(".md")
    print(f"{table}; left for the next call: {', '.join(left) or 'nothing'}")
    return any(record.failed(name) for name in names)


if __name__ == "__main__":
    # A piece has its own process group, so it must be killed before this process exits.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
