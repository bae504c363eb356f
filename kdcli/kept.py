"""Keep results that take long on disk, so that the steps of one run compute each of them once.

A file's name is a hash of everything that its result depends on. Arrays are stored exactly as they
were computed, so nothing depends on where they come from. No run needs these files: if one cannot
be written or read, its result is computed again.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kdcli.disk import disk_errors, write_atomic
from kdcli.errors import MachineError
from kdcli.messages import log
from kdcli.types import Array

MAX_FILE_BYTES, MAX_FOLDER_BYTES = 1 << 28, 1 << 30
"""Maximum size of the arrays in one file, and of all files after `delete_oldest_results`."""
DIGEST, TEXT = "sha256", "text"


@dataclass(frozen=True)
class Result:
    """Arrays by name, and a text."""

    arrays: Mapping[str, Array]
    text: str = ""

    @property
    def digest(self) -> str:
        """The hash of all values."""
        digest = hashlib.sha256(self.text.encode())
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass
class Keeper:
    """The results in a directory.

    Attributes:
        folder: The directory.
        seconds: The seconds in which the results were computed that were stored.
    """

    folder: Path
    seconds: float = 0.0

    def load(self, key: str) -> Result | None:
        """Return a result, or None if it is not stored or, after a log line, cannot be used."""
        file = self._file(key)
        if not file.is_file():
            return None
        try:
            with safe_open(file, framework="numpy") as stored:
                facts = stored.metadata() or {}
                arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            # The files that were used last are kept.
            file.touch()
            result = Result(arrays, facts.get(TEXT, ""))
            why = "" if facts.get(DIGEST) == result.digest else "its hash differs"
        except (OSError, SafetensorError) as error:
            why = str(error)
        if not why:
            return result
        log(f"{file} is damaged ({why}), so its content is computed again")
        with suppress(OSError):
            file.unlink()
        return None

    def store(self, key: str, result: Result, seconds: float) -> None:
        """Store a result that took some seconds to compute."""
        file = self._file(key)
        # A transposed array would be written in the order of its memory.
        arrays = {name: np.require(one, requirements="C") for name, one in result.arrays.items()}
        facts = {DIGEST: result.digest, TEXT: result.text}
        try:
            with disk_errors(file):
                self.folder.mkdir(parents=True, exist_ok=True)
            # Several processes may compute the same result.
            with FileLock(file.with_suffix(".lock")):
                if not file.is_file():
                    write_atomic(file, save(arrays, metadata=facts))
                file.with_suffix(".lock").unlink(missing_ok=True)
        except (MachineError, OSError, NotImplementedError) as error:
            why = error.message if isinstance(error, MachineError) else str(error)
            log(f"a result is not kept for later steps: {why}")
            return
        self.seconds += seconds
        delete_oldest_results(self.folder)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


_keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def keep_results(folder: Path) -> Iterator[Keeper]:
    """Keep the results that are computed within this context in a directory."""
    keeper = Keeper(folder)
    token = _keeper.set(keeper)
    try:
        yield keeper
    finally:
        _keeper.reset(token)


def keeper_for(nbytes: int = 0) -> Keeper | None:
    """Return what keeps a result of this many bytes.

    Returns None outside `keep_results`, and for a result that is too large.
    """
    return _keeper.get() if nbytes <= MAX_FILE_BYTES else None


def delete_oldest_results(folder: Path, max_bytes: int = MAX_FOLDER_BYTES) -> None:
    """Keep the files in a directory that were used last, up to `max_bytes` in total."""
    total = 0
    try:
        used = []
        for file in folder.glob("*.safetensors"):
            # Another process may delete it.
            with suppress(FileNotFoundError):
                used.append((file.stat(), file))
        for status, file in sorted(used, key=lambda each: each[0].st_mtime, reverse=True):
            total += status.st_size
            if total > max_bytes:
                file.unlink(missing_ok=True)
    except OSError as error:
        log(f"old results could not be deleted: {error}")
