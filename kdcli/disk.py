"""Atomic writes; a full or unwritable disk becomes a MachineError."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from kdcli.errors import MachineError


def cache_dir() -> Path:
    """`$KDCLI_CACHE`, else `~/.cache/kdcli`, else a temporary one; holds only what kdcli can make again."""
    if named := os.environ.get("KDCLI_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "kdcli"
    except RuntimeError:
        # A container's bare user id has no home.
        return Path(tempfile.gettempdir()) / f"kdcli-{os.getuid()}"


def cache_key(*parts: object) -> str:
    """24 hex digits of a hash over JSON values: equal parts, equal key."""
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:24]


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into a `MachineError` that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = getattr(error, "errno", None)
        if code == errno.ENOSPC or "No space left" in str(error):
            raise MachineError(
                f"the disk is full: {path} could not be written", "free some space, then --resume"
            ) from None
        raise MachineError(f"{path} could not be written: {error}") from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file aside, text as UTF-8, fsync it and rename it into place. Raises MachineError: the disk is full or
    not writable; the old file is untouched."""
    aside = path.with_name(f".{path.name}.part")
    with disk_errors(path):
        try:
            with aside.open("wb") as file:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Fill a directory aside, then put it in the place of `path`; after an error `path` is as it was. Raises
    MachineError: the disk is full or not writable."""
    aside = path.with_name(f".{path.name}.part")
    with disk_errors(path):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
            for file in aside.rglob("*"):
                fsync(file)
            if path.is_dir():
                shutil.rmtree(path)
            aside.rename(path)
            fsync(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
