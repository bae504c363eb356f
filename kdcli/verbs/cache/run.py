"""`kdcli cache`: show and delete the entries of the cache.

An entry is a file or directory that is named by a hash. Files with the same hash and a dot in front
belong to it: its note (see `kdcli.disk.use_entry`), the lock of its writer, and what a killed
writer left behind. Everything else in the cache's directory is not kdcli's, and is left alone.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from kdcli.disk import (
    MAX_NOTE_BYTES,
    cache_dir,
    is_file_at,
    lock_note,
    note_of,
    open_note,
    remove,
    without_home,
)
from kdcli.errors import MachineError, UsageError, check_known
from kdcli.messages import log
from kdcli.report.text import bytes_of
from kdcli.verbs.cache.settings import KINDS, OBJECTS, CleanOptions

MEASUREMENTS = "measurements"
NAME = re.compile(r"\.?((?:cpu-bf16-)?[0-9a-f]{24}(?:-[0-9a-f]{12})?)(?:\..+)?")
"""The name of a file of an entry. It begins with the name of the entry."""
MINUTE, HOUR, DAY = 60, 3600, 86_400


@dataclass(frozen=True)
class Entry:
    """An entry of the cache.

    Attributes:
        kind: A key of `KINDS`.
        name: The hash that names the entry.
        about: The model or data that it belongs to; empty if unknown.
        size: The number of bytes of all its files.
        last_use: The time of its last use, in seconds since 1970.
        paths: Its files and directories, with its note and what a killed writer left.
    """

    kind: str
    name: str
    about: str
    size: int
    last_use: float
    paths: tuple[Path, ...]

    def facts(self) -> dict[str, str | int]:
        """Return the values for `--json`."""
        return {
            "kind": self.kind,
            "name": self.name,
            "about": self.about,
            "bytes": self.size,
            "last_use": datetime.fromtimestamp(self.last_use, UTC).isoformat(timespec="seconds"),
        }


@dataclass(frozen=True)
class Listing:
    """The result of `kdcli cache ls`."""

    folder: Path
    entries: Sequence[Entry]

    def to_json(self) -> str:
        facts = {
            "folder": str(self.folder),
            "bytes": _size(self.entries),
            "entries": [entry.facts() for entry in self.entries],
        }
        return json.dumps(facts, indent=2)

    def renderables(self) -> Iterable[object]:
        if self.entries:
            yield table_of(self.entries)
        yield f"{_amount(self.entries)} in {escape(without_home(str(self.folder)))}"


@dataclass(frozen=True)
class Cleaned:
    """The result of `kdcli cache clean`.

    Attributes:
        deleted: The entries that were deleted.
        in_use: The entries that stay, because a kdcli uses them or used them meanwhile.
        failed: The entries that could not be deleted, each with the reason.
    """

    deleted: Sequence[Entry]
    in_use: Sequence[Entry]
    failed: Sequence[tuple[Entry, str]]

    def to_json(self) -> str:
        facts = {
            "bytes": _size(self.deleted),
            "deleted": [entry.facts() for entry in self.deleted],
            "in_use": [entry.facts() for entry in self.in_use],
            "failed": [entry.facts() | {"reason": reason} for entry, reason in self.failed],
        }
        return json.dumps(facts, indent=2)

    def renderables(self) -> Iterable[object]:
        yield f"deleted {_amount(self.deleted)}"
        if self.in_use:
            yield f"kept {_amount(self.in_use)}, which a running kdcli uses or has just used:"
            yield table_of(self.in_use)
        for entry, reason in self.failed:
            yield escape(f"{entry.kind} {entry.about or entry.name} could not be deleted: {reason}")

    def check(self) -> None:
        """Raise a MachineError if an entry could not be deleted."""
        if self.failed:
            amount = _amount([entry for entry, _ in self.failed])
            raise MachineError(f"{amount}: could not be deleted")


def ls() -> Listing:
    """List the cache."""
    return Listing(cache_dir(), entries_of(KINDS))


def selected(options: CleanOptions) -> list[Entry]:
    """Return the entries that `kdcli cache clean` deletes.

    Raises:
        UsageError: A kind is unknown.
    """
    for kind in options.kinds:
        check_known("kind", kind, KINDS)
    kinds = options.kinds or [kind for kind in KINDS if kind != OBJECTS]
    entries = entries_of(kinds)
    if options.older_than is None:
        return entries
    before = time.time() - options.older_than
    return [entry for entry in entries if entry.last_use <= before]


def confirmed(entries: Sequence[Entry]) -> bool:
    """Show entries and ask whether to delete them.

    Raises:
        UsageError: Nobody can answer.
    """
    if not _can_ask():
        raise UsageError(
            f"kdcli cache clean would delete {_amount(entries)}, and cannot ask",
            "add --yes, or name a kind or an age; kdcli cache ls shows the entries",
        )
    Console(stderr=True).print(table_of(entries))
    return typer.confirm(f"Delete {_amount(entries)}?", err=True)


def clean(entries: Iterable[Entry]) -> Cleaned:
    """Delete entries, except the ones that a running kdcli uses or has used since the listing."""
    deleted: list[Entry] = []
    in_use: list[Entry] = []
    failed: list[tuple[Entry, str]] = []
    for entry in entries:
        try:
            (deleted if _delete(entry) else in_use).append(entry)
        except MachineError as error:
            failed.append((entry, f"{error.message}; {error.hint}"))
        except OSError as error:
            failed.append((entry, without_home(str(error))))
    return Cleaned(deleted, in_use, failed)


def entries_of(kinds: Iterable[str]) -> list[Entry]:
    """Return the entries of some kinds, in the order of `KINDS`, the largest first.

    A kind's directory is not read if it is a link, because its files are outside the cache.
    """
    root, wanted = cache_dir(), set(kinds)
    entries: list[Entry] = []
    for kind in (kind for kind in KINDS if kind in wanted):
        folder = root if kind == MEASUREMENTS else root / kind
        if kind != MEASUREMENTS and folder.is_symlink():
            log(f"{folder} is a link, so its files are neither shown nor deleted")
            continue
        entries += sorted(_entries_in(folder, kind), key=lambda entry: (-entry.size, entry.name))
    return entries


def table_of(entries: Iterable[Entry]) -> Table:
    """Return a table for the terminal."""
    table = Table(
        "kind",
        Column("model or data", overflow="fold"),
        Column("size", justify="right", no_wrap=True),
        Column("last use", justify="right", no_wrap=True),
        header_style="bold",
    )
    for entry in entries:
        about = entry.about or f"made by an older version of kdcli ({entry.name[:8]})"
        table.add_row(entry.kind, Text(about), bytes_of(entry.size), _ago(entry.last_use))
    return table


def _entries_in(folder: Path, kind: str) -> Iterator[Entry]:
    by_name: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match is not None and match[1].startswith("cpu-") == (kind == MEASUREMENTS):
            by_name.setdefault(match[1], []).append(path)
    for name, paths in by_name.items():
        yield Entry(
            kind=kind,
            name=name,
            about=_about(note_of(folder / name)),
            size=sum(status.st_size for path in paths for status in _stats(path)),
            last_use=_last_use(paths),
            paths=tuple(paths),
        )


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a file, or of all files in a directory. Links are not followed."""
    # Another process may delete or move a file at any time.
    with suppress(FileNotFoundError):
        if not path.is_dir() or path.is_symlink():
            yield path.lstat()
            return
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(FileNotFoundError):
                yield Path(folder, file).lstat()


def _last_use(paths: Iterable[Path]) -> float:
    """Return the time of the latest change of some files and directories."""
    return max((status.st_mtime for path in paths for status in _stats(path)), default=0.0)


def _about(note: Path) -> str:
    """Read a note. Returns an empty text if the note cannot be read."""
    try:
        with open_note(note, creation=0) as file:
            return file.read(MAX_NOTE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _delete(entry: Entry) -> bool:
    """Delete an entry.

    Returns:
        False if a running kdcli uses it, or if it was used or deleted since it was listed.
    """
    note = note_of(entry.paths[0].with_name(entry.name))
    # A note that came or went since the listing belongs to another process.
    creation = 0 if note in entry.paths else os.O_CREAT | os.O_EXCL
    try:
        file = open_note(note, creation)
    except (FileExistsError, FileNotFoundError):
        return False
    with file:
        if not lock_note(file, shared=False) or not is_file_at(note, file):
            return False
        if _last_use(entry.paths) > entry.last_use:
            return False
        if sys.platform == "win32":
            # Windows deletes no file that is open in a process.
            file.close()
            try:
                remove(note)
            except PermissionError:
                return False
        # If this process is killed, no part of an entry is left under the name of the entry.
        for aside in [_move_aside(path) for path in entry.paths if path != note]:
            remove(aside)
        # A process that waits for the lock then sees that the note is gone, and makes a new one.
        remove(note)
    return True


def _move_aside(path: Path) -> Path:
    """Rename a file or directory of an entry, and return the path that it has now.

    Locks and what a killed process left keep their names, which begin with a dot.
    """
    if path.name.startswith("."):
        return path
    aside = path.with_name(f".{path.name}.old")
    remove(aside)
    return path.rename(aside)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _size(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries)


def _amount(entries: Sequence[Entry]) -> str:
    if not entries:
        return "nothing"
    noun = "entry" if len(entries) == 1 else "entries"
    return f"{len(entries):,} {noun}, {bytes_of(_size(entries))}"


def _ago(then: float) -> str:
    """Write how long ago a time was."""
    seconds = time.time() - then
    if seconds < 2 * MINUTE:
        return "now"
    if seconds < 2 * HOUR:
        return f"{seconds / MINUTE:.0f} min ago"
    return f"{seconds / HOUR:.0f} h ago" if seconds < 2 * DAY else f"{seconds / DAY:.0f} d ago"
