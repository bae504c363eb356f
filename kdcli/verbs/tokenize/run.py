"""`kdcli tokenize`: write a text as shards of tokens, which other verbs read as `--data`."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import numpy as np
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from kdcli.data.sources import Source, describe_unread, open_source
from kdcli.data.text.shards import Frame, TokenShards
from kdcli.data.text.tokenise import ShardWriter, tokenise
from kdcli.disk import check_writable
from kdcli.engine.inputs import check_not_input
from kdcli.engine.processes import handled_signals
from kdcli.errors import Stopped, UsageError
from kdcli.messages import log
from kdcli.models.load import load_tokenizer
from kdcli.report.text import bytes_of, duration

MAX_SAMPLES = 8
"""Number of places in the text that a dry run reads."""
PIECE_BYTES = 1 << 20
"""Size of the pieces among which a dry run chooses."""


@dataclass(frozen=True)
class TokenizedDirectory:
    """A directory of shards, with its tokens by split."""

    directory: str
    tokenizer: str
    shards: int
    tokens: dict[str, int]
    bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def renderables(self) -> Iterable[object]:
        table = Table("split", "tokens")
        for split, count in self.tokens.items():
            table.add_row(split, f"{count:,}")
        yield table
        shards = "1 shard" if self.shards == 1 else f"{self.shards} shards"
        yield f"{shards}, {bytes_of(self.bytes)}: --data {self.directory}"


@dataclass(frozen=True)
class TokenizeEstimate:
    """The result of a dry run. Values are None if the size of the source is not known."""

    source: str
    source_bytes: int | None
    shards: int
    tokens: int | None
    bytes: int | None
    hours: float | None
    workers: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def renderables(self) -> Iterable[object]:
        def known(value: float | None, text: str) -> str:
            return "unknown" if value is None else text

        table = Table("source", "shards", "tokens", "on disk", f"time, {self.workers} workers")
        table.add_row(
            known(self.source_bytes, bytes_of(self.source_bytes or 0)),
            f"{self.shards:,}",
            known(self.tokens, f"{self.tokens or 0:,}"),
            known(self.bytes, bytes_of(self.bytes or 0)),
            known(self.hours, duration((self.hours or 0) * 3600)),
        )
        yield table
        yield "estimated from a sample of the text; nothing was written"


def tokenize(
    *,
    source: str,
    tokenizer: str,
    column: str | None,
    share: float,
    workers: int | None,
    output_dir: Path | None,
    dry_run: bool,
) -> TokenizedDirectory | TokenizeEstimate:
    """Tokenise a text, or estimate the time and space that this needs.

    Args:
        source: A value of `--data`.
        tokenizer: The model that will read the text.
        column: The column of the text; None chooses it.
        share: The share of the training rows that is read.
        workers: The number of processes; None is one for each core.
        output_dir: The directory of the shards; may be None in a dry run.
        dry_run: Estimate only.

    Raises:
        UsageError: There is no directory, or it holds something else; the text cannot be read.
        MachineError: The directory cannot be written, or a worker was killed.
        Stopped: A signal ended the run; finished shards stay.
    """
    if output_dir is None and not dry_run:
        raise UsageError("no directory given", "kdcli tokenize SOURCE --tokenizer MODEL -o DIR")
    if output_dir is not None:
        check_writable(output_dir, directory=True)
        check_not_input(output_dir, [source, tokenizer], "-o")
    opened = open_source(source, share)
    if unread := describe_unread(opened):
        log(unread)
    loaded = load_tokenizer(tokenizer)
    workers = workers or _count_cores()
    if dry_run:
        return _estimate(opened, loaded, column, workers)
    assert output_dir is not None
    with handled_signals(_stop):
        meta = tokenise(opened, loaded, column, output_dir, workers=workers)
    meta.close_account()
    return TokenizedDirectory(
        directory=str(output_dir),
        tokenizer=meta.name,
        shards=len(meta.shards),
        tokens={split: meta.tokens_of(split) for split in meta.splits},
        bytes=sum(map(meta.bytes_of, meta.shards)),
    )


def _count_cores() -> int:
    """Count the cores that this process may use, or all cores if the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped("stopped; finished shards are kept", "run the same command to make the others")


def _estimate(
    source: Source, tokenizer: PreTrainedTokenizerBase, column: str | None, workers: int
) -> TokenizeEstimate:
    """Tokenise a few places of a text, and extrapolate to all of it."""
    # Use one thread, as each worker does.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    meta = TokenShards.plan(source, tokenizer, Frame.of(tokenizer), column)
    writer = ShardWriter.of(source, tokenizer, meta, Path())
    pieces = [
        (split, piece) for split in meta.splits for piece in source.pieces(split, PIECE_BYTES)
    ]
    size = sum(piece.size for _, piece in pieces)
    chosen = np.unique(np.linspace(0, len(pieces) - 1, MAX_SAMPLES).astype(int))
    began, read, tokens = time.monotonic(), 0, 0
    for number in chosen:
        split, piece = pieces[number]
        sample = source.sample(split, piece, column)
        read += sample.size
        tokens += sum(len(ids) + 1 for ids in writer.encode(sample.texts))
    seconds = time.monotonic() - began
    if not tokens:
        places = f" in the {len(chosen)} places that were sampled" if len(chosen) > 1 else ""
        raise UsageError(f"{source.name} holds no text{places}")
    shards = len(meta.shards)
    if not read:
        return TokenizeEstimate(source.name, size or None, shards, None, None, None, workers)
    all_tokens = round(tokens * size / read)
    workers = min(workers, shards)
    return TokenizeEstimate(
        source=source.name,
        source_bytes=size,
        shards=shards,
        tokens=all_tokens,
        bytes=all_tokens * np.dtype(meta.dtype).itemsize,
        hours=seconds * size / read / workers / 3600,
        workers=workers,
    )
