"""Writing so that a reader sees the old or the whole new, and a full disk is an error with a name."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from kdcli.errors import MachineError


def cache_dir() -> Path:
    """Where kdcli keeps what it can make again: `$KDCLI_CACHE`, else `~/.cache/kdcli`."""
    return Path(os.environ.get("KDCLI_CACHE") or Path.home() / ".cache" / "kdcli")


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
    """Write a file aside, text as UTF-8, fsync it and rename it into place.

    Raises:
        MachineError: the disk is full or not writable; the old file is untouched.
    """
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
