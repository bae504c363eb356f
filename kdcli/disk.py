"""Paths that a user gives: checked, read and written. Bounded reading of JSON; atomic writes."""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from kdcli.errors import MachineError, UsageError

MOST_BYTES, MOST_DEPTH = 10_000_000, 32  # Of a JSON file
MOST_REPORT = 200_000_000  # Bytes of a report, whose curve grows with the run
MOST_NAME = 255  # Bytes of a file name on every common file system
ASIDE = len("..part")  # What a name is longer while its file is written aside
SURROGATE = re.compile(r"[\ud800-\udfff]")
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
COMMITS: dict[str, str] = {}
"""Data sets of the hub that this run read, as they are named -> the commit that was the present
one."""


def cache_dir() -> Path:
    """`$KDCLI_CACHE`, else `~/.cache/kdcli`, else a temporary one; holds only what kdcli can make
    again."""
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


def unprintable(text: str) -> bool:
    """True for a text that is no UTF-8: bytes that were not, or half a surrogate pair."""
    return SURROGATE.search(text) is not None


def user_path(given: str | Path) -> Path:
    """A path that a user gave, its `~` expanded. Raises UsageError: not UTF-8, a zero byte, a name
    that is too long, or no such user."""
    text = str(given)
    if unprintable(text) or "\0" in text:
        raise UsageError(f"the path {text!a} is not UTF-8 text", "rename it, or give another")
    if long := next(
        (name for name in Path(text).parts if len(os.fsencode(name)) > MOST_NAME), None
    ):
        raise UsageError(
            f"a name of {len(os.fsencode(long))} bytes in a path: {long[:40]}...",
            f"at most {MOST_NAME}",
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{text} names the home of a user who is not there", "write the directory out"
        ) from None


def check_writable(path: Path, *, directory: bool) -> None:
    """Check, before any work, that a file or directory can be written; makes nothing. Raises
    UsageError: see `user_path`; the path, or what should be its directory, is of another kind;
    MachineError: no permission."""
    user_path(path)
    with disk_errors(path):
        if path.exists() and not (path.is_dir() if directory else path.is_file()):
            is_there = (
                "directory" if path.is_dir() else "file" if path.is_file() else "device or a pipe"
            )
            wanted = "directory" if directory else "file"
            raise UsageError(f"{path} is a {is_there}; it must be a {wanted}", "give another path")
        if len(os.fsencode(path.name)) > MOST_NAME - ASIDE:
            raise UsageError(
                f"the name {path.name[:40]}... is too long", f"at most {MOST_NAME - ASIDE} bytes"
            )
        above = path if directory else path.parent
        while not above.exists() and above != above.parent:
            above = above.parent
        if not above.is_dir():
            raise UsageError(f"{path} cannot be made: {above} is a file", "give another path")
        if not os.access(above, os.W_OK | os.X_OK):
            raise MachineError(
                f"{path} cannot be written: no permission to write in {above.absolute()}"
            )


def read_json(path: Path, *, most_bytes: int = MOST_BYTES, kind: type = dict) -> Any:
    """The object (or list, of `kind`) in a JSON file that others wrote. Raises UsageError, with the
    file's name: see `parse_json`; it cannot be read, or is larger than `most_bytes`."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} cannot be read: it is no file")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > most_bytes:
        raise UsageError(f"{path} is larger than {most_bytes:,} bytes, the most that is read")
    return parse_json(data, path, kind)


def parse_json(data: bytes, source: object, kind: type = dict) -> Any:
    """The object (or list, of `kind`) in some JSON; `source` names it in errors. Raises UsageError:
    not JSON, not UTF-8, nested deeper than `MOST_DEPTH`, or of another kind."""
    try:
        tree = json.loads(str(data, "utf-8"))
        if ESCAPED_SURROGATE.search(data):
            json.dumps(tree, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise UsageError(f"{source} is not valid JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{source} is nested deeper than {MOST_DEPTH} levels") from None
    if not isinstance(tree, kind):
        wanted = "object" if kind is dict else kind.__name__
        raise UsageError(f"{source} must hold a JSON {wanted}, not a {type(tree).__name__}")
    level: list[Any] = [tree]
    depth = 0
    while level := [
        c
        for n in level
        for c in (n.values() if isinstance(n, dict) else n)
        if isinstance(c, dict | list)
    ]:
        if (depth := depth + 1) > MOST_DEPTH:
            raise UsageError(f"{source} is nested deeper than {MOST_DEPTH} levels")
    return tree


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directories.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full, unwritable or unreadable disk into a `MachineError` that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = getattr(error, "errno", None)
        if code == errno.ENOSPC or "No space left" in str(error):
            raise MachineError(
                f"the disk is full: {path} could not be written", "free some space, then --resume"
            ) from None
        hint = (
            "set KDCLI_CACHE to a directory that can be written"
            if path.is_relative_to(cache_dir())
            else None
        )
        raise MachineError(f"{path} could not be written: {error}", hint) from None


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file aside, fsync it and rename it into place; a link stays, and what it names is
    written. Raises UsageError: what is there is no plain file; MachineError: the disk is full or
    not writable; after an error the old file is untouched."""
    # A rename would replace the link itself, which may be /dev/stdout.
    path = Path(os.path.realpath(path))
    aside = path.with_name(f".{path.name}.part")
    with disk_errors(path):
        if path.exists() and not path.is_file():
            # Root would replace /dev/null itself.
            raise UsageError(f"{path} is no plain file, so it is not written", "give another path")
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            fsync(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, as `atomic_file` does."""
    with atomic_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Fill a directory aside, then put it in the place of `path`; after an error `path` is as it
    was. Raises MachineError: the disk is full or not writable."""
    aside, before = (path.with_name(f".{path.name}.{ending}") for ending in ("part", "old"))
    with disk_errors(path):
        remove(aside)
        aside.mkdir(parents=True)
        try:
            yield aside
            for file in aside.rglob("*"):
                fsync(file)
            if path.is_dir():
                remove(before)
                path.rename(before)
            aside.rename(path)
            fsync(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(before, ignore_errors=True)


STAGED = ".staged"


@contextmanager
def fill_dir(path: Path, *, last: str, clear: bool = False) -> Iterator[Path]:
    """Fill a directory aside, then move each file into `path`, which itself stays: it may be a
    mount point, a link or the working directory. `last`: the file that is moved last, since it
    tells a whole directory. `clear`: remove what else is there. After an error nothing was moved.
    Raises MachineError: the disk is full or not writable."""
    staged, made = path / STAGED, not path.exists()
    try:
        with atomic_dir(staged) as aside:
            yield aside
        with disk_errors(path):
            for inside in path.iterdir() if clear else ():
                if inside != staged:
                    remove(inside)
            for file in sorted(staged.iterdir(), key=lambda file: (file.name == last, file.name)):
                file.replace(path / file.name)
            staged.rmdir()
    finally:
        if made and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def content_of(path: Path) -> list[Path]:
    """What a directory holds, without what a kill inside `fill_dir` left."""
    return [
        inside
        for inside in path.iterdir()
        if inside.name not in (STAGED, f".{STAGED}.part", f".{STAGED}.old")
    ]


def remove(path: Path) -> None:
    """Delete a file, a link or a directory with its content, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
