"""The candidates of many texts as a file that grows: a kill costs the last portion only.

A line of JSON says what the file is of; each further line holds a portion of texts with a checksum. A line is whole or
is not there: what follows the last good one is cut off and computed again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdcli.disk import disk_errors

FORMAT = 1
"""Raised when the lines change their meaning."""

Choices = list[tuple[int, int, list[str]]]
"""Of each word of a text: first character, character after the last, what may stand in its place."""


class CandidateFile:
    """Candidates of texts 0 … `done` - 1.

    Args:
        path: of the file; made with its directory where it is not there.
        key: what the file must be of, else it is written anew.
        count: texts there will be.
        log: told what was found, where it was any.

    Raises:
        MachineError: it cannot be read or written.
    """

    def __init__(self, path: Path, key: str, count: int, log: Callable[[str], None]) -> None:
        self.path = path
        self._found: list[Choices] = []
        header = json.dumps({"format": FORMAT, "key": key, "texts": count}).encode() + b"\n"
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._read(header, count, log):
                path.write_bytes(header)

    @property
    def done(self) -> int:
        """Texts whose candidates are there."""
        return len(self._found)

    def __getitem__(self, text: int) -> Choices:
        return self._found[text]

    def add(self, portion: Sequence[Choices]) -> None:
        """Write the candidates of the next texts; they are on the disk when this returns.

        Raises:
            MachineError: the disk is full or not writable.
        """
        body = json.dumps(list(portion), ensure_ascii=False, separators=(",", ":")).encode()
        with disk_errors(self.path), self.path.open("ab") as file:
            file.write(b"%08x " % zlib.crc32(body) + body + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._found += [[(b, e, list(options)) for b, e, options in choices] for choices in portion]

    def _read(self, header: bytes, count: int, log: Callable[[str], None]) -> bool:
        """Take what is there and cut off what is not whole; False where the file is of something else."""
        if not self.path.exists():
            return False
        with self.path.open("rb+") as file:
            if file.readline() != header:
                log(f"{self.path} is of other texts or settings: candidates are computed anew")
                return False
            good = file.tell()
            for line in file:
                portion = _portion(line)
                if portion is None or self.done + len(portion) > count:
                    if line.endswith(b"\n"):
                        log(
                            f"{self.path} is damaged after {self.done:,} of {count:,} texts: the rest is computed again"
                        )
                    break
                self._found += portion
                good += len(line)
            file.truncate(good)
        if self.done:
            log(f"candidates of {self.done:,} of {count:,} texts are taken from {self.path}")
        return True


def _portion(line: bytes) -> list[Choices] | None:
    """What a line holds; None when it is not whole."""
    body = line[9:-1]
    if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(body):
        return None
    found: list[Any] = json.loads(body)
    return [[(begin, end, options) for begin, end, options in choices] for choices in found]
