"""Tokenise a text into shards, in this process or in several.

Each shard is written completely or not at all. After a run was killed, the same command keeps the
finished shards. A shard is written again if its text has changed.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from kdcli.data.accounts import ACCOUNTS, RowAccount
from kdcli.data.sources import LOG_SECONDS, Source
from kdcli.data.text.shards import META, Frame, Shard, TokenShards
from kdcli.disk import atomic_file, disk_errors, remove
from kdcli.errors import MachineError, UsageError
from kdcli.messages import log, time_left

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOCK_SECONDS = 1.0  # Seconds after which a process logs that it waits for another process.
# Characters to tokenise at once. This needs some 30 MB of memory for documents of any length.
CHARS_PER_CALL = 1 << 20


def tokenise(
    source: Source,
    tokenizer: "PreTrainedTokenizerBase",
    column: str | None,
    folder: Path,
    *,
    workers: int | None = None,
    cached: bool = False,
) -> TokenShards:
    """Write the shards of a text that are missing in a directory.

    Args:
        source: The text.
        tokenizer: A tokenizer of transformers.
        column: The column of the text; None chooses it.
        folder: The directory of the shards.
        workers: The number of processes, each with one thread. None tokenises in this process,
            with as many threads as the tokenizer uses.
        cached: Whether the directory's name determines its content, as in the cache. Complete
            shards are then not compared with the source, a damaged directory is written again, and
            this process waits for another one that writes the same directory.

    Returns:
        The shards with their numbers of tokens.

    Raises:
        UsageError: The source cannot be read, the directory has other content, or another process
            is writing it.
        MachineError: The directory cannot be written, or a worker was killed. Finished shards are
            kept.
    """
    if ACCOUNTS.strict:
        _check_rows(source, column)
    frame = Frame.of(tokenizer)
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder, waits=cached):
        previous = _read_previous(folder, replaces=cached)
        if cached and previous and previous.complete and not previous.missing(folder, previous):
            return previous
        meta = TokenShards.plan(source, tokenizer, frame, column)
        if previous and not meta.has_origin_of(previous):
            if not cached:
                raise _other_origin(folder, meta, previous)
            previous = None  # The same content under another name.
        missing = meta.missing(folder, previous)
        if previous and previous.complete and not missing:
            log(f"{folder} is done already")
            return previous
        writer = ShardWriter.of(source, tokenizer, meta, folder)
        planned = {shard.file for shard in missing}
        if previous:
            meta = meta.finish(shard for shard in previous.shards if shard.file not in planned)
        with _clean_after_errors(folder, meta, missing, keeps_errors=not cached):
            for shard in _write_shards(writer, missing, len(meta.shards), workers):
                # A shard is finished when its counts are written, too.
                meta = meta.finish([shard])
                meta.write(folder)
        return meta


def _check_rows(source: Source, column: str | None) -> None:
    """Read all rows before any is tokenised. Raises a UsageError if some are empty or repeated."""
    for split in source.splits():
        account = RowAccount.of_split(source.name, split)
        account.kept = sum(1 for _ in source.placed_documents(split, column, account))
        ACCOUNTS.check(account)


@dataclass(frozen=True)
class ShardWriter:
    """Everything that a process needs to write a shard."""

    source: Source
    encoder: "Tokenizer | PreTrainedTokenizerBase"  # The latter if it is slow.
    sep_id: int
    column: str | None
    dtype: str
    folder: Path

    @classmethod
    def of(
        cls, source: Source, tokenizer: "PreTrainedTokenizerBase", meta: TokenShards, folder: Path
    ) -> "ShardWriter":
        """Prepare the writer of a plan."""
        encoder = tokenizer
        if tokenizer.is_fast:
            # Workers that only get the backend need not import transformers. Copy it, because its
            # truncation and padding may still be set from the last call.
            encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            encoder.no_truncation()
            encoder.no_padding()
        return cls(source, encoder, meta.sep_id, meta.column, meta.dtype, folder)

    def write(self, shard: Shard) -> Shard:
        """Write a shard completely or not at all, and return it with its counts."""
        total, logged = 0, time.monotonic()
        account = RowAccount(self.source.name)
        with atomic_file(self.folder / shard.file) as file:
            for texts, ends in calls_of(self._documents(shard, account)):
                for ids, is_end in zip(self.encode(texts), ends, strict=True):
                    tokens = [*ids, self.sep_id] if is_end else ids
                    file.write(np.asarray(tokens, dtype=self.dtype).tobytes())
                    total += len(tokens)
                if time.monotonic() - logged > LOG_SECONDS:
                    logged = time.monotonic()
                    log(f"{total:,} tokens of {shard.file} so far")
        account.kept = account.used
        return replace(shard, tokens=total, account=account)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenise texts without special tokens."""
        if isinstance(self.encoder, Tokenizer):
            encodings = self.encoder.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        encodings = self.encoder(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return list(encodings["input_ids"])

    def _documents(self, shard: Shard, account: RowAccount) -> Iterator[str]:
        for piece in shard.pieces:
            yield from self.source.documents_in(shard.split, piece, self.column, account)


def calls_of(documents: Iterator[str]) -> Iterator[tuple[list[str], list[bool]]]:
    """Group documents for calls of the tokenizer, each of about `CHARS_PER_CALL` characters.

    A longer document is cut before a space, where a tokenizer would also cut it. The second list
    tells which texts are the end of a document.
    """
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


@contextlib.contextmanager
def _lock(folder: Path, *, waits: bool) -> Iterator[None]:
    """Keep other processes from writing the directory."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    with disk_errors(folder):
        try:
            lock.acquire(timeout=LOCK_SECONDS if waits else 0)
        except Timeout:
            if not waits:
                hint = "wait for it, or give another directory"
                raise UsageError(f"another process is writing {folder}", hint) from None
            log(f"waiting for another process that tokenises into {folder}")
            lock.acquire()
    try:
        yield
    finally:
        # Others may wait for the lock of a cache entry.
        if not waits or not folder.exists():
            # Windows does not delete an open file.
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink()
        lock.release()


def _read_previous(folder: Path, *, replaces: bool) -> TokenShards | None:
    """Read the plan of an earlier run; None if the directory is empty.

    Other content is removed if `replaces` is set; otherwise it is a UsageError.
    """
    try:
        if (folder / META).is_file():
            return TokenShards.read(folder)
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            message = f"{folder} is not empty, and holds no tokens"
            raise UsageError(message, "give another directory")
    except UsageError:
        if not replaces:
            raise
        remove(folder)
    return None


def _other_origin(folder: Path, meta: TokenShards, previous: TokenShards) -> UsageError:
    message = (
        f"{folder} holds shards of {previous.source} by {previous.name}, "
        f"not of {meta.source} by {meta.name}"
    )
    if previous.column != meta.column:
        message += f"; column {previous.column}, not {meta.column}"
    return UsageError(message, "give another directory, or remove this one")


@contextlib.contextmanager
def _clean_after_errors(
    folder: Path, meta: TokenShards, missing: Sequence[Shard], *, keeps_errors: bool
) -> Iterator[None]:
    """Write the plan, and remove shards that do not belong to it.

    The directory is removed if an error occurs before the first shard is written. It is also
    removed after an error in the text, unless `keeps_errors` is set: the cache has another name for
    the corrected text.
    """
    kept = {shard.file for shard in meta.shards} - {shard.file for shard in missing}
    with disk_errors(folder):
        is_new = not folder.exists()
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*.bin"):
            if path.name not in kept:
                path.unlink()
    try:
        meta.write(folder)
        yield
    except BaseException as error:
        is_unwanted = isinstance(error, UsageError) and not keeps_errors
        if is_unwanted or (is_new and not any(folder.glob("*.bin"))):
            remove(folder)
        raise


def _write_shards(
    writer: ShardWriter, missing: Sequence[Shard], count: int, workers: int | None
) -> Iterator[Shard]:
    """Write shards in this process or in workers, and log the progress.

    Yields:
        Each shard with its counts when it is written.
    """
    began = time.monotonic()
    logged = 0.0
    done = 0
    tokens = 0
    size = sum(shard.size for shard in missing)
    megabytes = f" ({size / 1e6:,.1f} MB)" if size else ""
    log(f"tokenising {writer.source.name}{megabytes}: {len(missing)} of {count} shards")
    writes = (
        (writer.write(shard) for shard in missing)
        if workers is None
        else _write_in_workers(writer, missing, workers)
    )
    for number, shard in enumerate(writes, 1):
        yield shard
        done += shard.size
        tokens += shard.tokens or 0
        now = time.monotonic()
        if now - logged <= LOG_SECONDS and number < len(missing):
            continue
        logged = now
        line = f"{number} of {len(missing)} shards, {tokens:,} tokens"
        if rate := done / (now - began):
            line += f", {rate / 1e6:.2f} MB/s"
            if number < len(missing):
                line += f", {time_left((size - done) / rate)}"
        log(line)


def _write_in_workers(
    writer: ShardWriter, missing: Sequence[Shard], workers: int
) -> Iterator[Shard]:
    """Write shards in other processes, and yield each with its counts when it is finished."""
    count = min(workers, len(missing)) or 1
    # The threads of tokenizers and file systems do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _begin_worker, (writer,))
    try:
        waiting = {pool.submit(_write_in_worker, shard) for shard in missing}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        message = "a worker was killed from outside, often for lack of memory"
        hint = "run the same command again to continue; fewer --workers need less memory"
        raise MachineError(message, hint) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()


_writer: ShardWriter  # The writer of this worker process.


def _begin_worker(writer: ShardWriter) -> None:
    """Set up a worker with one thread, which ignores Ctrl-C and ends with its parent."""
    global _writer
    _writer = writer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The parent gets the same signal and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _write_in_worker(shard: Shard) -> Shard:
    try:
        return _writer.write(shard)
    except UsageError as error:
        # Subclasses with other constructor arguments cannot be sent to another process.
        raise UsageError(error.message, error.hint) from None
