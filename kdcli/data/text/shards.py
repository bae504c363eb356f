"""Text as shards of tokens: tokenised by one process or several, each shard written whole or not at all.

Shards of about `SHARD_BYTES` of text are planned first and listed in `meta.json`. A run that was killed keeps the
shards that are there, and a shard whose text changed since is made again. The documents of a split become one stream
with a separator after each; what the stream is does not depend on the number of workers or shards.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from kdcli.data.rows import Piece
from kdcli.data.sources import LOG_SECONDS, Log, Source
from kdcli.disk import (
    MOST_REPORT,
    atomic_file,
    cache_key,
    disk_errors,
    read_json,
    remove,
    write_atomic,
)
from kdcli.errors import MachineError, UsageError

META = "meta.json"
FORMAT = 2  # Raised when the files change their meaning.
SHARD_BYTES = 1 << 26  # Of text: half a minute of one worker, which is what a kill costs
SOON = 1.0  # Seconds after which a process says that it waits for another
CHARS_PER_CALL = (
    1 << 20
)  # Tokenised at once: some 30 MB of memory, whatever the length of documents.
SPLITS = ("train", "validation")
NAMED = re.compile(r"(train|validation)-\d{5,}\.bin")


@dataclass(frozen=True)
class Frame:
    """The tokens of a tokenizer that a block begins and ends with; the second also ends a document."""

    cls_id: int
    sep_id: int
    sep: str

    @classmethod
    def of(cls, tokenizer: Any) -> "Frame":
        """Those of a tokenizer of transformers. Raises UsageError: it has none."""
        first = (
            tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
        )
        last = (
            tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
        )
        if first is None or last is None:
            raise UsageError(
                "the tokenizer has neither [CLS]/[SEP] nor begin and end tokens to frame a block with"
            )
        return cls(int(first), int(last), str(tokenizer.convert_ids_to_tokens(last)))


@dataclass(frozen=True)
class Shard:
    """A file of tokens: `tokens` of them, None while they are not counted, from these pieces of a split."""

    file: str
    split: str
    pieces: tuple[Piece, ...]
    tokens: int | None = None

    @property
    def size(self) -> int:
        """Bytes of its text, about."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Meta:
    """`meta.json`: what was tokenised, by what, into which numbers, and the shards in order."""

    source: str
    column: str | None
    tokenizer: str  # its hash
    name: str  # of the tokenizer
    sep_id: int
    dtype: str
    shards: tuple[Shard, ...] = ()
    format: int = FORMAT

    @classmethod
    def planned(cls, source: Source, tokenizer: Any, frame: Frame, column: str | None) -> "Meta":
        """For a source and a tokenizer of transformers. Raises UsageError: see `kdcli.data.sources`."""
        dtype = "<u2" if max(tokenizer.get_vocab().values()) < 1 << 16 else "<u4"
        shards = []
        for split in SPLITS:
            # A source without training text raises here.
            if split == SPLITS[0] or source.has(split):
                groups = _grouped(source.pieces(split, SHARD_BYTES))
                shards += [
                    Shard(f"{split}-{n:05}.bin", split, tuple(group))
                    for n, group in enumerate(groups)
                ]
        of = tokenizer_hash(tokenizer)
        return cls(
            source.name, column, of, str(tokenizer.name_or_path), frame.sep_id, dtype, tuple(shards)
        )

    @classmethod
    def read(cls, folder: Path) -> "Meta":
        """Raises UsageError: not what kdcli wrote."""
        try:
            values = read_json(folder / META, most_bytes=MOST_REPORT)
            shards = tuple(
                Shard(
                    one["file"],
                    one["split"],
                    tuple(Piece(*piece) for piece in one["pieces"]),
                    one["tokens"],
                )
                for one in values.pop("shards")
            )
            meta = cls(**values, shards=shards)
            names = [shard.file for shard in shards if NAMED.fullmatch(shard.file)]
            counts = [shard.tokens for shard in shards if not isinstance(shard.tokens, int | None)]
            if (
                meta.format != FORMAT
                or meta.dtype not in ("<u2", "<u4")
                or counts
                or len(names) < len(shards)
            ):
                raise ValueError
            return meta
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(
                f"{folder / META} was not written by this kdcli's `tokenize`", "tokenise again"
            ) from None

    @property
    def of(self) -> tuple[object, ...]:
        """What must agree for shards to belong together."""
        return self.source, self.column, self.tokenizer, self.sep_id, self.dtype

    @property
    def splits(self) -> list[str]:
        """The splits that there are."""
        return list(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def whole(self) -> bool:
        """True once every shard was written."""
        return all(shard.tokens is not None for shard in self.shards)

    def write(self, folder: Path) -> None:
        write_atomic(folder / META, json.dumps(asdict(self), indent=1))

    def bytes_of(self, shard: Shard) -> int:
        """The length of a shard's file."""
        return (shard.tokens or 0) * np.dtype(self.dtype).itemsize

    def checked(self, folder: Path, tokenizer: Any, frame: Frame) -> "Meta":
        """These shards, all there and of this tokenizer. Raises UsageError."""
        again = f"the same `kdcli tokenize ... -o {folder}` again makes what is missing"
        if not self.whole:
            raise UsageError(f"the shards in {folder} are not finished", again)
        if self.tokenizer != tokenizer_hash(tokenizer) or self.sep_id != frame.sep_id:
            message = f"{folder} holds tokens of {self.name}, not of the tokenizer of {tokenizer.name_or_path}"
            raise UsageError(message, "tokenise the text with the tokenizer of this model")
        for shard in self.shards:
            path = folder / shard.file
            if not path.is_file():
                raise UsageError(f"{path} is missing, one of {len(self.shards)} shards", again)
            if (found := path.stat().st_size) != self.bytes_of(shard):
                raise UsageError(
                    f"{path} is cut: it has {found:,} bytes, not {self.bytes_of(shard):,}", again
                )
        return self


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of what decides which tokens a text becomes, special ones left out."""
    if not tokenizer.is_fast:
        return cache_key(tokenizer.get_vocab())
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    # The first two are left over from the last call; saving a model may rewrite the others.
    for part in ("truncation", "padding", "post_processor", "decoder"):
        parts.pop(part, None)
    return cache_key(parts)


def tokenise(
    source: Source,
    tokenizer: Any,
    column: str | None,
    folder: Path,
    *,
    log: Log,
    workers: int | None = None,
    cached: bool = False,
) -> Meta:
    """Write the shards of a source that are not there. `workers`: processes, each with one thread; None tokenises in
    this process, with as many threads as the tokenizer takes. `cached`: the directory's name says all of its content:
    another process that writes it is waited for, and whole shards are not compared with the source. Raises UsageError:
    see `kdcli.data.sources`; the directory holds something else, or another process writes it; MachineError: it cannot
    be written, or a worker was killed. Shards that were finished stay."""
    frame = Frame.of(tokenizer)
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, log, waits=cached):
        there = _there(folder, anew=cached)
        if cached and there is not None and there.whole and not _left(there, there, folder):
            return there
        meta = Meta.planned(source, tokenizer, frame, column)
        if there is not None and there.of != meta.of:
            raise UsageError(
                f"{folder} holds shards of {there.source} by {there.name}, not of {meta.source} by {meta.name}"
                + ("" if there.column == column else f"; column {there.column}, not {column}"),
                "give another directory, or remove this one",
            )
        left = _left(meta, there, folder)
        if there is not None and there.whole and not left:
            log(f"{folder} is done already")
            return there
        work = work_of(source, tokenizer, meta, folder)
        with _begun(folder, meta, left, keeps=not cached):
            _run(work, left, len(meta.shards), workers, log)
        with disk_errors(folder):
            size = np.dtype(meta.dtype).itemsize
            counted = [
                replace(s, tokens=(folder / s.file).stat().st_size // size) for s in meta.shards
            ]
        meta = replace(meta, shards=tuple(counted))
        meta.write(folder)
        return meta


@contextlib.contextmanager
def _locked(folder: Path, log: Log, *, waits: bool) -> Iterator[None]:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    with disk_errors(folder):
        try:
            lock.acquire(timeout=SOON if waits else 0)
        except Timeout:
            if not waits:
                hint = "wait for it, or give another directory"
                raise UsageError(f"another process is writing {folder}", hint) from None
            log(f"waiting for another process that tokenises into {folder}")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _begun(folder: Path, meta: Meta, left: Sequence[Shard], *, keeps: bool) -> Iterator[None]:
    """Write the plan, and take away shards of other text. After an error nothing is left of a run that finished no
    shard nor, unless it `keeps`, of one whose text was wrong: mended text has another name in the cache."""
    keep = {shard.file for shard in meta.shards} - {shard.file for shard in left}
    with disk_errors(folder):
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*.bin"):
            if path.name not in keep:
                path.unlink()
    try:
        meta.write(folder)
        yield
    except BaseException as error:
        if (isinstance(error, UsageError) and not keeps) or (
            made and not any(folder.glob("*.bin"))
        ):
            remove(folder)
        raise


def _there(folder: Path, *, anew: bool) -> Meta | None:
    """What an earlier run has left, None for nothing. `anew`: remove other things, which are a UsageError otherwise."""
    try:
        if (folder / META).is_file():
            return Meta.read(folder)
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UsageError(
                f"{folder} is not empty, and holds no tokens", "give another directory"
            )
    except UsageError:
        if not anew:
            raise
        remove(folder)
    return None


def whole_there(folder: Path) -> bool:
    """True for a directory with all of its shards, as long as they were written."""
    try:
        meta = Meta.read(folder)
    except UsageError:
        return False
    return meta.whole and not _left(meta, meta, folder)


def _left(meta: Meta, there: Meta | None, folder: Path) -> list[Shard]:
    """The shards that are not there, or of other text, or cut."""
    known = {shard.file: shard for shard in there.shards} if there else {}

    def done(shard: Shard) -> bool:
        before, path = known.get(shard.file), folder / shard.file
        if before is None or before.pieces != shard.pieces or not path.is_file():
            return False
        return before.tokens is None or path.stat().st_size == meta.bytes_of(before)

    return [shard for shard in meta.shards if not done(shard)]


def _grouped(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbours in groups of about `SHARD_BYTES`."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (not piece.size or size + piece.size > SHARD_BYTES):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size
    yield group


@dataclass(frozen=True)
class Work:
    """All that writing a shard needs."""

    source: Source
    encoder: Any
    sep_id: int
    column: str | None
    dtype: str
    folder: Path

    def write(self, shard: Shard, log: Log = lambda _: None) -> int:
        """Write a shard, whole or not at all; returns the number of its tokens."""
        total, logged = 0, time.monotonic()
        with atomic_file(self.folder / shard.file) as file:
            for texts, ends in _portions(self.documents(shard)):
                for ids, is_end in zip(self.ids(texts), ends, strict=True):
                    file.write(
                        np.asarray(
                            [*ids, self.sep_id] if is_end else ids, dtype=self.dtype
                        ).tobytes()
                    )
                    total += len(ids) + is_end
                if time.monotonic() - logged > LOG_SECONDS:
                    logged = time.monotonic()
                    log(f"{total:,} tokens of {shard.file} so far")
        return total

    def documents(self, shard: Shard) -> Iterator[str]:
        """Its documents."""
        read = (self.source.documents_in(shard.split, piece, self.column) for piece in shard.pieces)
        return itertools.chain.from_iterable(read)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without special ones."""
        if isinstance(self.encoder, Tokenizer):
            return [
                one.ids for one in self.encoder.encode_batch_fast(texts, add_special_tokens=False)
            ]
        found = self.encoder(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return list(found["input_ids"])


def work_of(source: Source, tokenizer: Any, meta: Meta, folder: Path) -> Work:
    """The work of a plan. Of a fast tokenizer a copy of its backend is taken, which needs no transformers in a worker;
    truncation and padding may be left over in it from the last call."""
    encoder = tokenizer
    if tokenizer.is_fast:
        encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        encoder.no_truncation()
        encoder.no_padding()
    return Work(source, encoder, meta.sep_id, meta.column, meta.dtype, folder)


def _run(work: Work, left: Sequence[Shard], count: int, workers: int | None, log: Log) -> None:
    """Write shards, here or in workers, and say how far it is."""
    began, logged, done, tokens = time.monotonic(), 0.0, 0, 0
    size = sum(shard.size for shard in left)
    known = f" ({size / 1e6:,.1f} MB)" if size else ""
    log(f"tokenising {work.source.name}{known}: {len(left)} of {count} shards")
    for number, (shard, written) in enumerate(_written(work, left, workers, log), 1):
        done, tokens = done + shard.size, tokens + written
        if (now := time.monotonic()) - logged > LOG_SECONDS or number == len(left):
            logged, rate = now, done / (now - began)
            pace = f", {rate / 1e6:.2f} MB/s" if rate else ""
            hours = (
                f", {(size - done) / rate / 3600:.2f} h left" if rate and number < len(left) else ""
            )
            log(f"{number} of {len(left)} shards, {tokens:,} tokens{pace}{hours}")


def _written(
    work: Work, left: Sequence[Shard], workers: int | None, log: Log
) -> Iterator[tuple[Shard, int]]:
    """Each shard once it is there, and the number of its tokens."""
    if workers is None:
        for shard in left:
            yield shard, work.write(shard, log)
        return
    # Not forked: the threads of a tokenizer and of file systems do not survive it.
    pool = ProcessPoolExecutor(
        min(workers, len(left)) or 1, multiprocessing.get_context("spawn"), _begin, (work,)
    )
    try:
        waiting = {pool.submit(_write_one, shard): shard for shard in left}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool:
        message = "a worker was ended from outside, often for lack of memory"
        raise MachineError(
            message, "the same command goes on where it was; fewer --workers take less"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()


_work: Work


def _begin(work: Work) -> None:
    """Set up a worker: one thread, deaf to Ctrl-C, which its parent hears, and gone when its parent is."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _write_one(shard: Shard) -> int:
    try:
        return _work.write(shard)
    except UsageError as error:
        # Of its own class only: others cannot be sent to another process.
        raise UsageError(error.message, error.hint) from None


def _portions(documents: Iterator[str]) -> Iterator[tuple[list[str], list[bool]]]:
    """Documents in portions of about `CHARS_PER_CALL` characters, and which pieces end a document. A document longer
    than that is cut before a space, where a tokenizer would cut it too."""
    texts: list[str] = []
    ends: list[bool] = []
    room = CHARS_PER_CALL
    for document in documents:
        begin = 0
        while begin < len(document):
            end = len(document)
            if end - begin > CHARS_PER_CALL:
                space = document.rfind(" ", begin + 1, begin + CHARS_PER_CALL)
                end = space if space > 0 else begin + CHARS_PER_CALL
            texts.append(document[begin:end])
            ends.append(end == len(document))
            room -= end - begin
            begin = end
            if room <= 0:
                yield texts, ends
                texts, ends, room = [], [], CHARS_PER_CALL
    if texts:
        yield texts, ends
