"""`kdcli tokenize`: a text as shards of tokens, which every verb that reads text takes as `--data`."""

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.table import Table

from kdcli.data.sources import Source, open_source
from kdcli.data.text.shards import Frame, Meta, tokenise, work_of
from kdcli.disk import check_writable
from kdcli.engine.progress import Progress
from kdcli.errors import Stopped, UsageError
from kdcli.models.load import load_tokenizer
from kdcli.report.text import bytes_of, duration

SAMPLES, SAMPLED_OF = 8, 1 << 20  # Pieces that a dry run reads the beginning of, and their bytes


@dataclass(frozen=True)
class Tokenised:
    """What lies in a directory of shards: tokens by split."""

    directory: str
    tokenizer: str
    shards: int
    tokens: dict[str, int]
    bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def renderables(self) -> Iterable[Any]:
        table = Table("split", "tokens")
        for split, count in self.tokens.items():
            table.add_row(split, f"{count:,}")
        yield table
        yield f"{self.shards} shards, {bytes_of(self.bytes)}: --data {self.directory}"


@dataclass(frozen=True)
class Estimate:
    """The result of a dry run, from a sample of the text; None where the size of the source is not known."""

    source: str
    source_bytes: int | None
    shards: int
    tokens: int | None
    bytes: int | None
    hours: float | None
    workers: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def renderables(self) -> Iterable[Any]:
        table = Table("source", "shards", "tokens", "on disk", f"time, {self.workers} workers")
        sizes = [
            bytes_of(n) if n is not None else "unknown" for n in (self.source_bytes, self.bytes)
        ]
        tokens = f"{self.tokens:,}" if self.tokens is not None else "unknown"
        took = duration(self.hours * 3600) if self.hours is not None else "unknown"
        table.add_row(sizes[0], f"{self.shards:,}", tokens, sizes[1], took)
        yield table
        yield "from a sample of the text tokenised just now; nothing was written"


def run(
    *,
    source: str,
    tokenizer: str,
    column: str | None,
    workers: int | None,
    output_dir: Path | None,
    dry_run: bool,
    trust_remote_code: bool,
) -> Tokenised | Estimate:
    """Tokenise a source, or estimate what that takes. `workers`: processes, None one a core. Raises UsageError: see
    `kdcli.data.text.shards.tokenise`; no directory given; MachineError: it cannot be written; Stopped: by a signal,
    with the finished shards on disk."""
    if output_dir is None and not dry_run:
        raise UsageError("no directory given", "kdcli tokenize SOURCE --tokenizer MODEL -o DIR")
    if output_dir is not None:
        check_writable(output_dir, directory=True)
    opened = open_source(source)
    loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    workers = workers or (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if dry_run:
        return _estimate(opened, loaded, column, workers)
    assert output_dir is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    meta = tokenise(opened, loaded, column, output_dir, log=Progress.log, workers=workers)
    counts = {
        split: sum(s.tokens or 0 for s in meta.shards if s.split == split) for split in meta.splits
    }
    size = sum(map(meta.bytes_of, meta.shards))
    return Tokenised(str(output_dir), meta.name, len(meta.shards), counts, size)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped("stopped; the shards that are done stay", "the same command makes the others")


def _estimate(source: Source, tokenizer: Any, column: str | None, workers: int) -> Estimate:
    # As a worker does.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    frame = Frame.of(tokenizer)
    meta = Meta.planned(source, tokenizer, frame, column)
    work = work_of(source, tokenizer, meta, Path())
    pieces = [(split, piece) for split in meta.splits for piece in source.pieces(split, SAMPLED_OF)]
    size = sum(piece.size for _, piece in pieces)
    began, read, tokens = time.monotonic(), 0, 0
    places = np.unique(np.linspace(0, len(pieces) - 1, SAMPLES).astype(int))
    for at in places:
        split, piece = pieces[at]
        texts, sampled = source.sample(split, piece, column)
        read += sampled
        tokens += sum(len(ids) + 1 for ids in work.ids(texts))
    seconds = time.monotonic() - began
    if not tokens:
        raise UsageError(
            f"{source.name} holds no text in the {len(places)} places that were sampled"
            if len(places) > 1
            else f"{source.name} holds no text"
        )
    if not read:
        return Estimate(source.name, size or None, len(meta.shards), None, None, None, workers)
    count = round(tokens * size / read)
    at_once = min(workers, len(meta.shards))
    hours = seconds * size / read / at_once / 3600
    on_disk = count * np.dtype(meta.dtype).itemsize
    return Estimate(source.name, size, len(meta.shards), count, on_disk, hours, at_once)
