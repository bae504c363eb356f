"""The manifest of an output directory: the files that kdcli wrote there, with their content.

`--overwrite` deletes a file only if the manifest lists it with the content that it has. Each file
is listed before it is moved into place, so that a killed process leaves no file unlisted. Stages
of a run and steps of a compression are listed in the manifest of the outermost run.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

MANIFEST = ".manifest.jsonl"
NOT_LISTED = frozenset({"checkpoints", "signals"})
"""Directories of temporary files, which are large, and have names that only kdcli uses."""
_RECORDED: set[Path] = set()
"""The directories whose files this process lists. A stage of a run is not one of them."""


def file_sha256(path: Path) -> str:
    """Return the hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begin_manifest(folder: Path) -> None:
    """List every file of a directory as written by kdcli, and then the ones that are written.

    Args:
        folder: An output directory without files of other origin.
    """
    folder = folder.resolve()
    if _recorder(folder) is not None:
        return
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    lines = _lines(folder, {file: file for file in files})
    aside = folder / f"{MANIFEST}.part"
    aside.write_text(lines, "utf-8")
    aside.replace(folder / MANIFEST)
    _RECORDED.add(folder)


def continue_manifest(folder: Path) -> None:
    """List the files that are written from now on, if the directory has a manifest.

    A directory of an older version has none: its first files would be missing.
    """
    if (folder / MANIFEST).is_file():
        _RECORDED.add(folder.resolve())


def recorded_directories() -> frozenset[Path]:
    """Return the directories whose files this process lists. A child lists its files there too."""
    return frozenset(_RECORDED)


def record(contents: Mapping[Path, Path]) -> None:
    """List files before they are moved into place, if their directory is recorded.

    Args:
        contents: The final place of each file -> the file that holds its content.
    """
    absolute = {place.parent.resolve() / place.name: file for place, file in contents.items()}
    folder = next(filter(None, map(_recorder, absolute)), None)
    if folder is not None and (lines := _lines(folder, absolute)):
        with (folder / MANIFEST).open("a", encoding="utf-8") as manifest:
            manifest.write(lines)


class Manifest:
    """The files that kdcli wrote in a directory, as `is_unchanged` compares them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known = folder, set[tuple[object, ...]]()
        self.exists = (folder / MANIFEST).is_file()
        lines = (folder / MANIFEST).read_bytes().split(b"\n") if self.exists else []
        for line in lines:
            try:
                entry = json.loads(line)
                self._known.add((entry["file"], entry["size"], entry["sha256"]))
            except (ValueError, TypeError, KeyError, RecursionError):
                # The file in a damaged line counts as unknown.
                continue
        self._sizes = {known[:2] for known in self._known}

    def is_unchanged(self, path: Path) -> bool:
        """Whether a file below the directory has content that kdcli wrote there."""
        if path.is_symlink() or not path.is_file():
            return False
        sized = path.relative_to(self.folder).as_posix(), path.stat().st_size
        return sized in self._sizes and (*sized, file_sha256(path)) in self._known


def _recorder(path: Path) -> Path | None:
    """Return the outermost recorded directory above a path, unless it has been deleted."""
    recorded = (above for above in reversed(path.parents) if above in _RECORDED)
    return next((above for above in recorded if (above / MANIFEST).is_file()), None)


def _lines(folder: Path, contents: Mapping[Path, Path]) -> str:
    entries = [
        {
            "file": place.relative_to(folder).as_posix(),
            "size": file.stat().st_size,
            "sha256": file_sha256(file),
        }
        for place, file in contents.items()
        if not any(
            part in NOT_LISTED or part.startswith(".") for part in place.relative_to(folder).parts
        )
    ]
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)
