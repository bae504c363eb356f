"""Check, read and write the paths that a user gives, with bounded JSON and atomic writes."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock
from safetensors import SafetensorError

from kdcli.errors import MachineError, UsageError, did_you_mean
from kdcli.manifest import MANIFEST, begin_manifest, record

MAX_BYTES, MAX_DEPTH = 10_000_000, 32  # limits of a JSON file
MAX_REPORT_BYTES = 200_000_000  # limit of a report, whose curve grows with the run
MAX_NAME_BYTES = 255  # limit of a file name on every common file system
PART_BYTES = len("..part")  # extra length of the name while a file is written
SURROGATE = re.compile(r"[\ud800-\udfff]")
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
EMBEDDED = {"demo": "demo_teacher", "demo-classifier": "demo_classifier"}
"""Name of each model inside the package -> its directory in kdcli/data."""
RECIPE_FILE, LOG_FILE, REPORT_FILE = "recipe.yaml", "log.jsonl", "report.json"
"""Files in the directory of a run. The report is the last one."""
LOCK = ".lock"
"""The lock of an output directory. A killed process leaves the file, which then locks nothing."""
COMMITS: dict[str, str] = {}
"""Name of each hub data set that this run read -> the commit that was current."""
HASHES: dict[str, str] = {}
"""Path of each local file of data that this run opened, as the user gave it -> its sha256. Also
the address of a teacher's server -> a hash of the model that it serves."""


def cached_file(repository: str, name: str, revision: str | None = None) -> Path | None:
    """Return a repository's file in the hub's cache, without a request.

    Returns None if it is not there, or if no repository can have this name.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(repository, name, revision=revision)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


def cache_dir() -> Path:
    """Return the cache directory.

    It holds files that kdcli can create again, and `objects/`, the data that was given to a
    function of Python as an object; see `kdcli.data.objects`. Each directory in it is a kind of
    entries, which `kdcli.verbs.cache` lists and deletes.

    It is `$KDCLI_CACHE`, otherwise `~/.cache/kdcli`, otherwise a temporary directory.
    """
    if directory := os.environ.get("KDCLI_CACHE"):
        return user_path(directory)
    try:
        return Path.home() / ".cache" / "kdcli"
    except RuntimeError:
        # A container's bare user id has no home directory.
        return Path(tempfile.gettempdir()) / f"kdcli-{os.getuid()}"


def cache_key(*parts: object) -> str:
    """Return 24 hex digits of a hash over JSON values; equal parts have the same key."""
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:24]


USED = ".used"
"""The ending of the note next to a cache entry. The note tells what the entry is for. Its
modification time is the time of last use."""
MAX_NOTE_BYTES = 10_000
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks."""
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers of files that may be read but not written."""
_NOTES: dict[Path, IO[bytes]] = {}
"""The notes of the entries that this process uses. They stay open: closing one unlocks it."""


def note_of(entry: Path) -> Path:
    """Return the path of the note next to a cache entry."""
    return entry.with_name(f".{entry.name.partition('.')[0]}{USED}")


def use_entry(entry: Path, about: str = "") -> None:
    """Tell `kdcli cache` that this process uses a cache entry, from now on until it ends.

    Call this before looking for the entry, so that `kdcli cache clean` cannot delete it in between.
    If the entry is being deleted, the call waits until it is gone.

    Args:
        entry: The file or directory, which need not exist yet.
        about: The model or data that the entry belongs to, for `kdcli cache ls`.

    Raises:
        MachineError: The cache cannot be written and does not hold the entry.
    """
    note = note_of(entry)
    try:
        with disk_errors(note):
            note.parent.mkdir(parents=True, exist_ok=True)
            if entry not in _NOTES or not is_file_at(note, _NOTES[entry]):
                _NOTES[entry] = _locked_note(note)
            file = _NOTES[entry]
            if about and file.writable():
                # The new text comes first: another process may write the same text at this time.
                file.seek(0)
                file.write(about.encode("utf-8", "replace")[:MAX_NOTE_BYTES])
                file.truncate()
            os.utime(note)
    except MachineError:
        # An entry in a cache that is shared read-only can be read. Without a note to lock, only
        # its age protects it from a user who may delete it.
        if not entry.exists():
            raise


@contextmanager
def lock_entry(entry: Path) -> Iterator[None]:
    """Keep other processes from writing a cache entry at the same time.

    Raises:
        MachineError: The cache cannot be written, or its file system has no locks.
    """
    lock = FileLock(entry.with_name(f".{entry.name}.lock"))
    with disk_errors(entry):
        try:
            lock.acquire()
        except NotImplementedError as error:
            # Older versions of filelock raise this without locks.
            raise OSError(errno.ENOSYS, str(error)) from None
    try:
        yield
    finally:
        lock.release()


def _locked_note(note: Path) -> IO[bytes]:
    """Open a note, and lock it together with the other users of the entry."""
    while True:
        file = open_note(note)
        lock_note(file, shared=True)
        if is_file_at(note, file):
            return file
        # It was deleted while this process waited for the lock.
        file.close()


def open_note(note: Path, creation: int = os.O_CREAT) -> IO[bytes]:
    """Open a note for reading and writing, or for reading if it cannot be written.

    Args:
        note: The path of the note.
        creation: Flags of `os.open`. By default, the note is created if it does not exist.
    """
    # A link could lead to a file outside the cache.
    no_link = getattr(os, "O_NOFOLLOW", 0)
    try:
        file = os.open(note, os.O_RDWR | creation | no_link, 0o666)
    except OSError as error:
        if error.errno not in READ_ONLY or not note.exists():
            raise
        return os.fdopen(os.open(note, os.O_RDONLY | no_link), "rb", buffering=0)
    return os.fdopen(file, "r+b", buffering=0)


def is_file_at(path: Path, file: IO[bytes]) -> bool:
    """Whether an open file is still the one at a path."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def lock_note(file: IO[bytes], *, shared: bool) -> bool:
    """Lock the note of a cache entry.

    Args:
        file: The open note.
        shared: Whether to wait for a lock that several users of the entry can hold. Otherwise try
            to take the lock that excludes all users.

    Returns:
        False if another process holds a lock that prevents it.

    Raises:
        MachineError: Nobody can exclude other users, because the file system has no locks.
    """
    if sys.platform == "win32":
        # Windows refuses to delete a file that a process has open.
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        if not shared:
            raise MachineError(
                "this file system has no locks, so kdcli cannot tell whether the entry is in use",
                "delete the entry yourself when no kdcli runs",
            ) from None
    return True


def unprintable(text: str) -> bool:
    """Return whether a text cannot be encoded as UTF-8.

    Such a text comes from bytes that were not UTF-8, or contains half of a surrogate pair.
    """
    return SURROGATE.search(text) is not None


def is_path(text: str) -> bool:
    """Whether a word from a user is the path of something. A word may be longer than any name."""
    try:
        return Path(text).exists()
    except OSError:
        return False


def near_path(path: str, names: Iterable[str] = ()) -> str:
    """Return `"; did you mean 'runs/x'?"` for the closest name next to a missing path, or an empty
    string.

    Args:
        path: The path that a user gave.
        names: Other names that are allowed.
    """
    parent, slash, name = path.rstrip("/").rpartition("/")
    siblings = {each.name for each in user_path(f"{parent}{slash}" or ".").glob("[!.]*")} - {name}
    if not slash:
        return did_you_mean(name, [*siblings, *names])
    near = did_you_mean(name, siblings).replace("'", f"'{parent}{slash}", 1)
    return near or did_you_mean(path, names)


def user_path(path: str | Path) -> Path:
    """Check a path that a user gave, and expand its `~`.

    Raises:
        UsageError: The path is not UTF-8, contains a zero byte or a name that is too long, or there
            is no such user.
    """
    text = str(path)
    if unprintable(text) or "\0" in text:
        raise UsageError(
            f"the path {text!a} is not UTF-8 text", "rename the file, or give another path"
        )
    if long := next(
        (name for name in Path(text).parts if len(os.fsencode(name)) > MAX_NAME_BYTES), None
    ):
        raise UsageError(
            f"the path contains a name of {len(os.fsencode(long))} bytes: {long[:40]}...",
            f"use names of at most {MAX_NAME_BYTES} bytes",
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(
            f"cannot expand '{text}': there is no such user", "write the path in full"
        ) from None


def holds_run(folder: Path) -> bool:
    """Return whether a directory holds a run of kdcli, finished or not."""
    return (folder / RECIPE_FILE).is_file() and (folder / LOG_FILE).is_file()


def as_directory(name: str) -> str:
    """Return a name for a directory without ':', which some file systems refuse."""
    return name.replace(":", "_")


def without_home(text: str) -> str:
    """Write ~ for the home directory wherever it occurs in a text."""
    try:
        home = Path.home()
    except RuntimeError:
        # A container's bare user id has no home directory.
        return text
    if home == Path(home.anchor):
        return text
    return re.sub(rf"(?<![\w./-]){re.escape(str(home))}(?![\w.-])", "~", text)


def check_writable(path: Path, *, directory: bool) -> None:
    """Check, before any work, that a file or directory can be written; it creates nothing.

    Raises:
        UsageError: `user_path` rejects the path, or the path or its parent is of another kind.
        MachineError: There is no permission to write.
    """
    user_path(path)
    with disk_errors(path):
        if path.exists() and not (path.is_dir() if directory else path.is_file()):
            actual = (
                "directory" if path.is_dir() else "file" if path.is_file() else "device or a pipe"
            )
            wanted = "directory" if directory else "file"
            raise UsageError(f"{path} is a {actual}; it must be a {wanted}", "give another path")
        if len(os.fsencode(path.name)) > MAX_NAME_BYTES - PART_BYTES:
            raise UsageError(
                f"the name {path.name[:40]}... is too long",
                f"use a name of at most {MAX_NAME_BYTES - PART_BYTES} bytes",
            )
        above = path if directory else path.parent
        while not above.exists() and above != above.parent:
            if above.is_symlink():
                raise UsageError(
                    f"{path} cannot be created: the link {above} leads nowhere", "give another path"
                )
            above = above.parent
        if not above.is_dir():
            raise UsageError(f"{path} cannot be created: {above} is a file", "give another path")
        if not os.access(above, os.W_OK | os.X_OK):
            raise MachineError(
                f"{path} cannot be written: no permission to write in {above.absolute()}"
            )


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, kind: type = dict) -> Any:
    """Read the object (or, with `kind`, the list) in a JSON file from any source.

    Raises:
        UsageError: The file cannot be read, is larger than `max_bytes`, or `parse_json` rejects its
            content. The message names the file.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} cannot be read: it is not a file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise UsageError(f"{path} is larger than {max_bytes:,} bytes, the limit for this file")
    return parse_json(data, path, kind)


def parse_json(data: bytes, source: object, kind: type = dict) -> Any:
    """Parse JSON that holds an object (or, with `kind`, a list); `source` names it in errors.

    Raises:
        UsageError: The data is not JSON, is not UTF-8, is nested deeper than `MAX_DEPTH` levels, or
            is of another kind.
    """
    try:
        tree = json.loads(str(data, "utf-8"))
        if ESCAPED_SURROGATE.search(data):
            json.dumps(tree, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise UsageError(f"{source} is not valid JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{source} is nested deeper than {MAX_DEPTH} levels") from None
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
        if (depth := depth + 1) > MAX_DEPTH:
            raise UsageError(f"{source} is nested deeper than {MAX_DEPTH} levels")
    return tree


def fsync(path: Path) -> None:
    """Flush a file or directory to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open directories
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert errors of a full, unwritable or unreadable disk to a `MachineError` with the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = getattr(error, "errno", None)
        if code == errno.ENOSPC or "No space left" in str(error):
            raise MachineError(
                f"the disk is full: {path} could not be written",
                "free some space and give the command again; one that trains takes --resume",
            ) from None
        hint = (
            "set KDCLI_CACHE to a directory that can be written"
            if path.is_relative_to(cache_dir())
            else None
        )
        raise MachineError(f"{path} could not be written: {error}", hint) from None


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Write to a temporary file, fsync it and rename it into place.

    A link stays a link, and the file that it points to is written. After an error, the old file is
    unchanged. A missing directory is made.

    Raises:
        UsageError: The path exists and is not a regular file.
        MachineError: The disk is full or not writable.
    """
    # A rename would replace the link itself, such as /dev/stdout.
    path = Path(os.path.realpath(path))
    aside = path.with_name(f".{path.name}.part")
    with disk_errors(path):
        if path.exists() and not path.is_file():
            # As root, a rename would replace /dev/null itself.
            raise UsageError(
                f"{path} is not a regular file, so it is not written", "give another path"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            record({path: aside})
            aside.replace(path)
            fsync(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file as `atomic_file` does; text is encoded as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Fill a temporary directory, then move it to `path`.

    After an error, `path` is unchanged.

    Raises:
        MachineError: The disk is full or not writable.
    """
    aside, before = (path.with_name(f".{path.name}.{ending}") for ending in ("part", "old"))
    with disk_errors(path):
        remove(aside)
        aside.mkdir(parents=True)
        try:
            yield aside
            contents = list(aside.rglob("*"))
            for file in contents:
                fsync(file)
            record({path / f.relative_to(aside): f for f in contents if f.is_file()})
            if path.is_dir():
                remove(before)
                path.rename(before)
            aside.rename(path)
            fsync(path.parent)
        finally:
            if before.is_dir() and not path.exists():
                # An interrupt came between the two renames.
                before.rename(path)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(before, ignore_errors=True)


STAGED = ".staged"


@contextmanager
def fill_dir(path: Path, *, last: str, clear: bool = False) -> Iterator[Path]:
    """Fill a temporary directory, then move each file into `path`.

    `path` itself stays, because it may be a mount point, a link or the working directory. If
    filling the directory fails, nothing is moved.

    Args:
        path: The directory to fill.
        last: The file that is moved last, because it marks a complete directory.
        clear: Remove everything else in `path`, and list the new files in its manifest. Files of
            other origin have been refused.

    Raises:
        MachineError: The disk is full or not writable.
    """
    staged, created = path / STAGED, not path.exists()
    try:
        with atomic_dir(staged) as aside:
            yield aside
        with disk_errors(path):
            if clear:
                begin_manifest(path)
            record({path / f.relative_to(staged): f for f in staged.rglob("*") if f.is_file()})
            for inside in path.iterdir() if clear else ():
                if inside.name not in (STAGED, LOCK, MANIFEST):
                    remove(inside)
            for file in sorted(staged.iterdir(), key=lambda file: (file.name == last, file.name)):
                if (path / file.name).is_dir():
                    # A file can be replaced, but a directory only if it is empty.
                    remove(path / file.name)
                file.replace(path / file.name)
            staged.rmdir()
    finally:
        if created and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def is_half_filled(path: Path, last: str) -> bool:
    """Return whether a killed `fill_dir` left a directory with only a part of its files.

    The files that were moved are no longer in the staged directory, and `last` is not moved yet.
    """
    if not (path / STAGED).is_dir() or (path / last).exists():
        return False
    moved = {inside.name for inside in content_of(path)}
    return moved.isdisjoint(inside.name for inside in (path / STAGED).iterdir())


def content_of(path: Path) -> list[Path]:
    """Return the content of a directory, without its lock, its manifest and the remains of a
    killed `fill_dir`."""
    unfinished = (LOCK, MANIFEST, f"{MANIFEST}.part", STAGED, f".{STAGED}.part", f".{STAGED}.old")
    return [inside for inside in path.iterdir() if inside.name not in unfinished]


def remove(path: Path) -> None:
    """Delete a file, a link or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
