"""Files on this machine and at URLs: their names, sizes, versions and errors.

URLs are read with fsspec.
"""

import functools
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from kdcli.disk import user_path
from kdcli.errors import UsageError, one_line

MAX_HASHED_FILES, MAX_HASHED_BYTES = 1000, 2**31  # Larger directories of data get no hash.
MAX_LISTED_FILES = 12  # Maximum number of file names in a message.
# The keys under which file systems store a version of a file. The first one that exists is used.
VERSION_KEYS = (
    *("ETag", "blob_id", "oid"),
    *("CRC", "LastModified", "Last-Modified", "last_modified", "mtime"),
)
LOGIN_HINT = (
    "is the address right, and are you logged in? "
    "`hf auth login` (hf://), AWS_ACCESS_KEY_ID ... (s3://)"
)

# A small packed file may hold gigabytes. Text packs to a tenth of its size, rarely to a hundredth.
MAX_RATIO = 200
MAX_UNPACKED = 1 << 23  # Up to this size, files may pack as well as they do.
UNPACK_HINT = "if this is right, save the rows as .jsonl"

File = Path | str  # A path on this machine, or a URL.


class NotFound(UsageError):
    """There is no such data. Callers that know the purpose of the data add a hint."""


class FileStat(NamedTuple):
    """A file's full name, its size in bytes (0 if unknown), and a version of its content.

    The version of a local file is the hash of its content, because a copy may keep the time stamp
    of another file. The version of a remote file is the one that its server reports.
    """

    name: str
    size: int
    version: str


def as_file(name: str) -> File:
    """Return a URL unchanged, and any other name as a path."""
    return name if "://" in name else Path(name)


def base_name(file: File) -> str:
    """Return the last part of a path or URL."""
    if isinstance(file, Path) or "://" not in file:
        return Path(file).name
    # A file in a zip file has the URL `zip://NAME::URL`.
    return file.split("::")[0].split("?")[0].rstrip("/").rsplit("/", 1)[-1]


def file_stat(file: File) -> FileStat:
    """Look up a file's name, size and version. Raises UsageError if it cannot be read."""
    if isinstance(file, Path):
        try:
            return FileStat(str(file.resolve()), file.stat().st_size, content_hash(file))
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {one_line(error)}") from None
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    with remote_errors(file):
        system, path = fsspec.core.url_to_fs(file)
        info = system.info(path)
    if isinstance(system, LocalFileSystem):
        return file_stat(Path(path))
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return FileStat(file, info.get("size") or 0, version)


def content_hash(path: Path) -> str:
    """Return the sha256 of a file. A file that has not changed is read once in each process."""
    stat = path.stat()
    times = stat.st_mtime_ns, stat.st_ctime_ns  # A program can set the first, but not the second.
    return _sha256(str(path.resolve()), stat.st_ino, stat.st_size, times)


def folder_hash(files: Sequence[Path]) -> str | None:
    """Return the sha256 of the names and contents of files in a directory.

    In the directory, `sha256sum FILES | sha256sum` gives the same hash for files in this order,
    unless it escapes a name, as it does with a backslash or a line break. The result is None for
    too many or too large files, because reading them takes too long.

    Args:
        files: The files, sorted by name.
    """
    if len(files) > MAX_HASHED_FILES or sum(f.stat().st_size for f in files) > MAX_HASHED_BYTES:
        return None
    lines = "".join(f"{content_hash(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


@functools.cache
def _sha256(name: str, inode: int, size: int, times: tuple[int, int]) -> str:
    with Path(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_size(name: str, size: int, unpacked: int, limit: int = MAX_UNPACKED) -> None:
    """Raise a UsageError if a file of `size` bytes unpacks to many more bytes, above a limit."""
    if unpacked > max(limit, MAX_RATIO * size):
        raise UsageError(
            f"{name} unpacks to more than {MAX_RATIO} times its size: {size:,} bytes become at "
            f"least {unpacked:,}",
            UNPACK_HINT,
        )


@contextmanager
def open_binary(file: File) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes. Raises UsageError if a URL cannot be read."""
    if isinstance(file, Path):
        with file.open("rb") as local:
            yield local
        return
    import fsspec

    with remote_errors(file), fsspec.open(file, "rb") as remote:
        # The files of fsspec ignore the size limit of `readline`.
        yield io.BufferedReader(remote)


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Turn every error of a file system of fsspec into a UsageError that names the URL."""
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        missing = re.search(r"[iI]nstall (?:[\"'`]?)([\w-]+)", str(error))
        package = missing[1] if missing else str(error.name)
        message = f"{url} cannot be read: {package} is not installed"
        raise UsageError(message, f"pip install {package}") from None
    except FileNotFoundError as error:
        # fsspec reports every refusal of a web server as a missing file; the cause tells why.
        cause = error.__cause__
        if cause is not None and getattr(cause, "status", None) != 404:
            raise UsageError(f"{url} cannot be read: {one_line(cause)}", LOGIN_HINT) from None
        raise NotFound(f"no data at {url}", LOGIN_HINT) from None
    except Exception as error:  # noqa: BLE001  # Each file system raises its own classes.
        reason = one_line(error) or type(error).__name__
        hint = LOGIN_HINT if "://" in url else None
        raise UsageError(f"{url} cannot be read: {reason}", hint) from None


def list_names(names: list[str]) -> str:
    """Join the first names for a message; "nothing" if the list is empty."""
    more = " ..." if len(names) > MAX_LISTED_FILES else ""
    return (", ".join(names[:MAX_LISTED_FILES]) or "nothing") + more


def list_folder(folder: Path) -> str:
    """List the content of a directory for a message."""
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    return list_names(sorted(f"{p.name}{'/' if p.is_dir() else ''}" for p in visible))


def list_siblings(source: str) -> str:
    """List the directory of a missing file for a message, if the directory exists."""
    folder = user_path(source).parent
    if "/" not in source or not folder.is_dir():
        return ""
    return f"; {folder} holds {list_folder(folder)}"
