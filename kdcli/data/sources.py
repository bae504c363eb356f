"""Sources of rows and documents, as `--data` names them.

A source is a file, a directory or .zip of files, a directory that `save_to_disk` of `datasets`
wrote, a clone of a data set of the hub (`DIRECTORY[:config]`), a URL of one of them (`hf://`,
`s3://`, `https://`), a data set on the hub (`owner/name[:config][:split][@revision]`), or `demo`.

Each line of a .txt file is a document, except for blank lines. In other formats, each row holds a
document in the given column, in one with a usual name, such as `text`, or in the only column of
strings. Blank and null documents are skipped.
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from kdcli.data.accounts import REPEATED, RowAccount, is_repeated
from kdcli.data.annotations import convert_annotations
from kdcli.data.demo import DOCUMENTS, demo_documents, demo_identity
from kdcli.data.hub import (
    DATA_SET_ID,
    HubId,
    clone_files,
    hub_rows,
    hub_size,
    hub_splits,
    split_address,
)
from kdcli.data.readers import (
    FORMATS,
    PACKED,
    Sample,
    counted_documents,
    cut_file,
    first_texts,
    format_of,
    read_documents,
    read_rows,
    sample_documents,
)
from kdcli.data.rows import CARD, INFOS, ClassNames, OnBadRow, Piece, Row, raise_bad_row, share_of
from kdcli.data.storage import (
    File,
    NotFound,
    base_name,
    check_size,
    content_hash,
    file_stat,
    folder_hash,
    list_folder,
    list_names,
    list_siblings,
    remote_errors,
)
from kdcli.disk import HASHES, cache_dir, near_path, read_json, use_entry, user_path
from kdcli.errors import UsageError

SOURCE_HINT = (
    "give a file, a directory, a URL, a hub id like owner/name[:config][:split][@revision], or "
    "'demo'"
)
FORMAT_ENDINGS = ", ".join(f".{name}" for name in FORMATS)
PACKED_ENDINGS = ", ".join(f".{name}" for name in PACKED)
OTHER_ENDINGS = {
    **dict.fromkeys(("xlsx", "xls", "ods"), "save the sheet as CSV UTF-8 (.csv)"),
    **dict.fromkeys(("pkl", "pickle", "pt", "spacy"), "save the rows as .parquet or .jsonl"),
    "feather": "end its name in .arrow",
    "tab": "end its name in .tsv",
    **dict.fromkeys(("tar", "tgz", "rar", "7z"), "unpack it, or pack it as .zip"),
}
PART_NUMBER = re.compile(r"[-_]\d+(-of-\d+)?(-[0-9a-f]{16})?(?=\.|$)")  # Of a split's files.
OTHER_NAMES = {
    "training": "train",
    **dict.fromkeys(("valid", "val", "dev", "eval", "evaluation"), "validation"),
    "testing": "test",
}
SPLITS = ("train", "validation", "test")
SPLIT = re.compile(rf"(train|validation|test|{'|'.join(OTHER_NAMES)})(_[a-z]+)?(_\d+)?")
OF_PARTS = re.compile(r"(.*?)(\d+)-of-(\d+)\b.*")
"""Matches a file name that states the number of files, such as `train-00000-of-00003.csv`."""
DESCRIPTIONS = (".json", ".arrow")
PAPERS = ("readme", "license", "licence", "notice", "citation", "changelog", "requirements")
"""The names of .txt files next to data."""
ZIP = ".zip"
HUB_FOLDER = "data"
SAVED_DICT, SAVED_STATE = "dataset_dict.json", "state.json"  # Of `save_to_disk`.
SAVED_HINT = "save the data set again with .flatten_indices().save_to_disk(), or as Parquet"
SPLITS_HINT = "one of them should be train, validation or test"
UNREAD_HINT = (
    "kdcli reads train, validation and test of one directory: rename the file, or give it alone as "
    "--data"
)
LOG_SECONDS = 10.0  # Seconds between log lines about the progress.


class SourceFile(NamedTuple):
    """A file of a split: its name and its rows."""

    name: str
    rows: Iterator[Row]


@dataclass(frozen=True)
class Source(ABC):
    """Rows and documents by split.

    Methods that take a split raise `NotFound` if there is no such split, and a UsageError that
    names the file and the row if something cannot be read.

    Attributes:
        name: The value of `--data`.
        share: The share of the training rows that is read; see `kdcli.data.rows.share_of`.
    """

    name: str
    share: float = field(default=1.0, kw_only=True)

    @property
    def identity(self) -> list[object]:
        """JSON that changes whenever the rows that are read may have changed."""
        return [*self.content, *([self.share] if self.share < 1 else [])]

    @property
    @abstractmethod
    def content(self) -> list[object]:
        """JSON that changes whenever the content of the whole source may have changed."""

    @abstractmethod
    def splits(self) -> Sequence[str]:
        """List the splits."""

    @abstractmethod
    def tables(self, split: str, on_bad: OnBadRow = raise_bad_row) -> Iterator[SourceFile]:
        """Yield the files of a split; `on_bad` is called with each line that is not a row."""

    @abstractmethod
    def pieces(self, split: str, max_bytes: int) -> list[Piece]:
        """Cut a split into pieces of about `max_bytes`; some formats are not cut."""

    @abstractmethod
    def documents_in(
        self, split: str, piece: Piece, column: str | None, account: RowAccount
    ) -> Iterator[str]:
        """Yield the documents of one of the `pieces`; `account` counts the rows."""

    def sample(self, split: str, piece: Piece, column: str | None) -> Sample:
        """Take documents from the beginning of one of the `pieces`."""
        texts, size = first_texts(self.documents_in(split, piece, column, RowAccount(self.name)))
        return Sample(texts, min(piece.size, int(size / piece.share)))

    def has(self, split: str) -> bool:
        """Whether there is such a split."""
        return split in self.splits()

    def documents(self, split: str, column: str | None) -> Iterator[str]:
        """Yield the documents of a split. Raises UsageError if a file has no documents."""
        account = RowAccount(self.name)
        return (text for _, text in self.placed_documents(split, column, account))

    def placed_documents(
        self, split: str, column: str | None, account: RowAccount
    ) -> Iterator[tuple[str, str]]:
        """Yield the place and the text of each document of a split.

        `account` counts the rows, and leaves out the empty ones. With `--strict-data`, it also
        leaves out repeated ones, which are then an error.

        Raises:
            UsageError: A file has no documents.
        """
        seen: set[int] = set()
        for table in self.tables(split, account.on_bad):
            for where, text in self._checked_documents(table, column, account):
                if is_repeated(text, seen):
                    account.leave_out(REPEATED, where)
                else:
                    yield where, text

    def _checked_documents(
        self, table: SourceFile, column: str | None, account: RowAccount
    ) -> Iterator[tuple[str, str]]:
        """Yield the place and the text of each document. Raises UsageError if a file has none."""
        is_empty = True
        for document in counted_documents(table.rows, column, account):
            is_empty = False
            yield document
        if is_empty and self.share == 1:
            raise UsageError(f"{table.name} holds no text")

    def share_in(self, split: str) -> float:
        """Return the share of a split's rows that is read."""
        return self.share if split == "train" else 1.0

    def _check_split(self, split: str) -> None:
        if not self.has(split):
            splits = ", ".join(self.splits()) or "none"
            raise NotFound(f"{self.name} has no {split} split; it has {splits}")


@dataclass(frozen=True)
class FileSource(Source):
    """Files on this machine or at URLs, by split."""

    files: Mapping[str, tuple[File, ...]]
    classes: ClassNames = field(default_factory=ClassNames)

    @property
    def content(self) -> list[object]:
        return [[split, *file_stat(file)] for split, files in self.files.items() for file in files]

    def splits(self) -> Sequence[str]:
        return list(self.files)

    def tables(self, split: str, on_bad: OnBadRow = raise_bad_row) -> Iterator[SourceFile]:
        self._check_split(split)
        share = self.share_in(split)
        for file in self.files[split]:
            yield SourceFile(str(file), self._rows(Piece(str(file), share=share), on_bad))

    def _rows(self, piece: Piece, on_bad: OnBadRow = raise_bad_row) -> Iterator[Row]:
        rows = map(self.classes.name_row, read_rows(piece, on_bad))
        return convert_annotations(rows, on_bad)

    def pieces(self, split: str, max_bytes: int) -> list[Piece]:
        self._check_split(split)
        pieces = [piece for file in self.files[split] for piece in cut_file(file, max_bytes)]
        return [piece._replace(share=self.share_in(split)) for piece in pieces]

    def documents_in(
        self, split: str, piece: Piece, column: str | None, account: RowAccount
    ) -> Iterator[str]:
        if piece.end is not None:
            return read_documents(piece, column, account)
        rows = self._rows(piece, account.on_bad)
        table = SourceFile(piece.name, rows)
        return (text for _, text in self._checked_documents(table, column, account))

    def sample(self, split: str, piece: Piece, column: str | None) -> Sample:
        return sample_documents(piece, column)


@dataclass(frozen=True)
class HubSource(Source):
    """A data set on the hub."""

    hub: HubId

    @property
    def content(self) -> list[object]:
        return ["hub", *self.hub]

    def splits(self) -> Sequence[str]:
        return hub_splits(self.hub)

    def tables(self, split: str, on_bad: OnBadRow = raise_bad_row) -> Iterator[SourceFile]:
        self._check_split(split)
        rows = share_of(hub_rows(self.hub, split), self.share_in(split), on_bad)
        rows = convert_annotations(rows, on_bad)
        yield SourceFile(f"{self.name} {split}", rows)

    def pieces(self, split: str, max_bytes: int) -> list[Piece]:
        self._check_split(split)
        shards, size = hub_size(self.hub, split)
        whole = Piece(f"{self.name} {split}", size=size // shards, share=self.share_in(split))
        return [whole._replace(begin=n, end=n + 1) for n in range(shards)]

    def documents_in(
        self, split: str, piece: Piece, column: str | None, account: RowAccount
    ) -> Iterator[str]:
        rows = hub_rows(self.hub, split, piece.begin)
        rows = share_of(rows, self.share_in(split), account.on_bad)
        return (text for _, text in counted_documents(rows, column, account))


@dataclass(frozen=True)
class DemoSource(Source):
    """The text that kdcli generates."""

    name: str = "demo"

    @property
    def content(self) -> list[object]:
        return ["demo", demo_identity()]

    def splits(self) -> Sequence[str]:
        return list(DOCUMENTS)

    def tables(self, split: str, on_bad: OnBadRow = raise_bad_row) -> Iterator[SourceFile]:
        self._check_split(split)
        name = f"demo {split}"
        documents = enumerate(demo_documents(split), 1)
        rows = (Row(f"{name}:{number}", {"text": text}) for number, text in documents)
        yield SourceFile(name, share_of(rows, self.share_in(split), on_bad))

    def pieces(self, split: str, max_bytes: int) -> list[Piece]:
        self._check_split(split)
        return [Piece("demo", version=demo_identity(), share=self.share_in(split))]

    def documents_in(
        self, split: str, piece: Piece, column: str | None, account: RowAccount
    ) -> Iterator[str]:
        return (text for _, text in self.placed_documents(split, column, account))


def open_source(source: str, share: float = 1.0) -> Source:
    """Resolve a value of `--data`. The hash of a local file or directory is kept for the report.

    Args:
        source: The value.
        share: The share of the training rows that is read.

    Raises:
        NotFound: There is no such data.
        UsageError: The format of a file is unknown, or a URL cannot be read.
    """
    return replace(_open(source), share=share)


def _open(source: str) -> Source:
    if source == "demo":
        return DemoSource()
    if "://" in source:
        return FileSource(source, _remote_files(source))
    path, config = split_address(source)
    if path.parent == cache_dir() / "objects":
        # A recipe of a Python function may name an object that is in the cache.
        use_entry(path)
    if path.is_file():
        _remember_hash(source, lambda: content_hash(path))
        if path.name.lower().endswith(ZIP):
            return FileSource(source, _remote_files(str(path)))
        _check_format(path, path.name)
        return FileSource(source, {"train": (path,)})
    if path.is_dir():
        opened = _open_folder(source, path, config)
        read = {Path(file) for of_split in opened.files.values() for file in of_split}
        # A card names classes, or the files of each split.
        if opened.classes.columns or clone_files(path, config) is not None:
            read |= {path / name for name in (CARD, INFOS) if (path / name).is_file()}
        _remember_hash(source, lambda: folder_hash(sorted(read)))
        return opened
    return HubSource(source, hub_id(source))


def _open_folder(source: str, folder: Path, config: str | None) -> FileSource:
    """Open a directory of `save_to_disk`, a clone of a data set of the hub, or any other one."""
    if (by_split := _saved_splits(folder)) is not None:
        return FileSource(source, by_split)
    clone = clone_files(folder, config)
    if clone is None:
        return FileSource(source, _local_splits(folder), ClassNames.of_card(folder))
    known = names_by_split(clone.files, str(folder))
    if not known:
        raise NotFound(f"{folder} has the splits {', '.join(clone.files)}", SPLITS_HINT)
    by_split = {split: tuple(clone.files[name]) for split, (name, *_) in known.items()}
    for file in itertools.chain.from_iterable(by_split.values()):
        _check_format(file, base_name(file))
    return FileSource(source, by_split, clone.classes)


def _remember_hash(source: str, compute: Callable[[], str | None]) -> None:
    """Remember the hash of a local file or directory when it is first opened."""
    if source in HASHES:
        return
    # Whoever reads the files reports why they cannot be read.
    with suppress(OSError):
        if (value := compute()) is not None:
            HASHES[source] = value


def check_data_exists(source: str) -> None:
    """Raise `NotFound` for a path with nothing at it, and check no other source.

    This opens no file and asks no server, so it can run before torch is loaded.
    """
    if source != "demo" and "://" not in source and not split_address(source)[0].exists():
        hub_id(source)


def hub_id(source: str) -> HubId:
    """Parse the id of a data set on the hub. Raises `NotFound` if the source is a path."""
    hub = DATA_SET_ID.fullmatch(source)
    if hub is None or source.startswith((".", "/", "~")) or format_of(source):
        near = near_path(source) or list_siblings(source)
        raise NotFound(f"no data at {source}{near}", SOURCE_HINT)
    return HubId(hub[1], hub[2] or None, hub[3], hub[4])


def _check_format(file: File, name: str) -> None:
    if not format_of(name):
        raise UsageError(
            f"{file} has no known format; known: {FORMAT_ENDINGS}, each also packed as one of "
            f"{PACKED_ENDINGS}, and {ZIP}",
            OTHER_ENDINGS.get(name.rpartition(".")[2].lower()),
        )


def _saved_splits(folder: Path) -> dict[str, tuple[File, ...]] | None:
    """Find the files that `save_to_disk` of `datasets` wrote, by split; None if it did not.

    Raises:
        UsageError: The directory's own list of files is damaged, or no split has a known name.
    """
    folders = {"train": folder}
    if (folder / SAVED_DICT).is_file():
        names = read_json(folder / SAVED_DICT).get("splits", [])
        known = names_by_split(names, str(folder))
        folders = {split: folder / name for split, (name, *_) in known.items()}
        if not folders:
            raise NotFound(f"{folder} has the splits {', '.join(names)}", SPLITS_HINT)
    elif not (folder / SAVED_STATE).is_file():
        return None
    by_split: dict[str, tuple[File, ...]] = {}
    for split, of_split in folders.items():
        state = read_json(of_split / SAVED_STATE)
        try:
            # The names are of files in this directory.
            paths = [of_split / Path(file["filename"]).name for file in state["_data_files"]]
        except (KeyError, TypeError):
            raise UsageError(f"{of_split / SAVED_STATE} lists no files", SAVED_HINT) from None
        if state.get("_indices_data_files"):
            raise UsageError(f"{of_split} holds a selection of rows", SAVED_HINT)
        by_split[split] = tuple(paths)
    return by_split


def _local_splits(folder: Path) -> dict[str, tuple[File, ...]]:
    """Find the files of a directory by split.

    They may be in a directory `data`, or in a directory for each split, as in a hub's clone.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists() and _is_data(path.name):
            raise UsageError(
                f"{path} is a link to {path.readlink()}, which does not exist",
                "copy the file that was linked, for example with cp -L or rsync -L",
            )
    files = {p.name: p for p in sorted(folder.iterdir()) if p.is_file() and p.name != INFOS}
    if not any(map(_is_data, files)):
        if (folder / HUB_FOLDER).is_dir():
            return _local_splits(folder / HUB_FOLDER)
        folders = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}
        by_split = names_by_split(folders, str(folder))
        if by_split:
            return {
                split: _local_splits(folders[name])["train"]
                for split, (name, *_) in by_split.items()
            }
    return _by_split(folder, files, list_folder(folder))


def _remote_files(url: str) -> dict[str, tuple[File, ...]]:
    """Find the files at the URL of a file, a directory or a zip file, by split."""
    import fsspec

    archive = f"::{url}" if url.split("?")[0].lower().endswith(ZIP) else ""
    with remote_errors(url):
        if archive:
            system, path = fsspec.core.url_to_fs(f"zip://{archive}")
            entries = _inside(system.ls(path, detail=True))
            folders = [entry["name"] for entry in entries if entry["type"] == "directory"]
            has_data = any(_is_data(base_name(entry["name"])) for entry in entries)
            if len(folders) == 1 and not has_data:
                entries = _inside(system.ls(folders[0], detail=True))
            members = [entry for entry in entries if entry["type"] == "file"]
            for member in members:
                check_size(base_name(member["name"]), member["compress_size"], member["size"])
            inner = [member["name"] for member in members]
            content = list_names(sorted(base_name(entry["name"]) for entry in entries))
            return _by_split(url, {base_name(p): f"zip://{p}{archive}" for p in inner}, content)
        system, path = fsspec.core.url_to_fs(url)
        name = base_name(url)
        # Web servers have no directories.
        if format_of(name) or "http" in url.split("://")[0] or not system.isdir(path):
            _check_format(url, name)
            system.info(path)
            return {"train": (url,)}
        entries = system.ls(path, detail=True)
        paths = [entry["name"] for entry in entries if entry["type"] == "file"]
        files: dict[str, File] = {base_name(p): system.unstrip_protocol(p) for p in paths}
        return _by_split(url, files, list_names(sorted(files)))


def _inside(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a zip file that a person put there."""
    return [e for e in entries if not base_name(e["name"]).startswith((".", "__MACOSX"))]


def _by_split(folder: File, files: Mapping[str, File], content: str) -> dict[str, tuple[File, ...]]:
    """Sort the readable files of a directory by the split in their names.

    If no name has a split, all files are training data.
    """
    names = [name for name in sorted(files) if format_of(name) and not name.startswith(".")]
    if not names:
        message = f"{folder} has no file of a known format; it holds {content}"
        hint = f"it should hold train.* and perhaps validation.* with one of {FORMAT_ENDINGS}"
        raise NotFound(message, hint)
    rows = list(filter(_holds_rows, names)) or names
    by_split = names_by_split(names, str(folder))
    inner = list(map(_inner_part, rows))
    if not by_split and all(inner) and any(word.startswith("train") for word in inner):
        by_split = names_by_split(rows, str(folder), _inner_part)
    if not by_split:
        _check_twins(rows, str(folder))
        by_split = {"train": rows}
    return {split: tuple(files[name] for name in of_split) for split, of_split in by_split.items()}


def _check_twins(names: Sequence[str], folder: str) -> None:
    """Raise a UsageError if two files have one name and two formats, as copies have."""
    by_stem: dict[str, str] = {}
    for name in names:
        stem = _unpacked_name(name).rpartition(".")[0]
        if by_stem.setdefault(stem, name) != name:
            raise UsageError(
                f"{folder} has {by_stem[stem]} and {name}, which may hold the same rows",
                "move one of them away, or rename it",
            )


def _unpacked_name(name: str) -> str:
    """Return the name that a file has after it is unpacked."""
    form = format_of(name)
    return name.rpartition(".")[0] if form is not None and form.packed else name


def _first_part(name: str) -> str:
    return name.lower().split(".")[0].split("-")[0]


def _inner_part(name: str) -> str:
    """Return the only word of a name that is a split, as in `reviews.train.csv`; "" without it."""
    words = [word for word in re.split(r"[-._ ]+", name.lower()) if SPLIT.fullmatch(word)]
    return words[0] if len(words) == 1 else ""


def describe_unread(source: Source, sets: Iterable[str] = ()) -> str | None:
    """Return a message about files with rows that lie next to the files that are read.

    They are in a local directory, in a directory below it, or in a zip file.

    Args:
        source: The source.
        sets: The sets of a task, whose names may follow the name of a split.
    """
    if not isinstance(source, FileSource):
        return None
    read = {*SPLITS, *(f"{split}_{name}" for split in SPLITS for name in sets)}
    used = {file for split in source.files.keys() & read for file in source.files[split]}
    place = user_path(source.name)
    if place.is_dir():
        names = _beside({file for files in source.files.values() for file in files}, used, sets)
    elif place.is_file() and source.name.lower().endswith(ZIP):
        inside = {str(file).partition("::")[0].removeprefix("zip://") for file in used}
        with ZipFile(place) as archive:
            names = [
                name
                for name in archive.namelist()
                if name not in inside
                and _holds_rows(base_name(name))
                and not any(part.startswith(".") for part in name.split("/"))
            ]
    else:
        return None
    if not names:
        return None
    return f"skipped: {list_names(sorted(names))}; {UNREAD_HINT}"


def _beside(files: Iterable[File], used: Collection[File], sets: Iterable[str]) -> list[str]:
    """List the files and directories with rows that lie next to files and are not used."""
    folders = {file.parent for file in files if isinstance(file, Path)}
    others = [path for folder in folders for path in folder.iterdir() if path not in used]
    names = [path.name for path in others if path.is_file() and _holds_rows(path.name)]
    known = {*sets, *(folder.name for folder in folders)}
    for path in others:
        if path.name in known or path.name.startswith("."):
            continue
        # Another user's directory, such as lost+found, may be unreadable.
        with suppress(OSError):
            inner = {each.name for each in path.iterdir()} if path.is_dir() else set()
            # A model may have a vocab.txt.
            if "config.json" not in inner and any(map(_holds_rows, inner)):
                names.append(f"{path.name}/")
    return names


def _is_data(name: str) -> bool:
    """Return whether a file has a known format, and is neither hidden nor a text about the data."""
    form = format_of(name)
    if form is None or name.startswith("."):
        return False
    return form.name != "txt" or name.lower().split(".")[0] not in PAPERS


def _holds_rows(name: str) -> bool:
    """Return whether a file next to the files of a split looks like rows.

    There, a .json file is usually a description, and an .arrow file a cache.
    """
    return _is_data(name) and not name.lower().endswith(DESCRIPTIONS)


def describe_missing_parts(names: Iterable[str]) -> str | None:
    """Return a warning if files such as `train-00000-of-00003.csv` are not all there."""
    found: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(OF_PARTS.fullmatch, names)):
        found.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), numbers in found.items():
        missing = int(total) - len(numbers)
        if missing > 0:
            # The numbers begin with 0, or with 1 if one of them equals the total.
            begin = int(int(total) in numbers)
            first = next(number for number in itertools.count(begin) if number not in numbers)
            return (
                f"{missing:,} of {int(total):,} files are missing; the first is "
                f"{stem}{first:0{len(total)}}-of-{total}"
            )
    return None


def names_by_split(
    names: Iterable[str], where: str, part_of: Callable[[str], str] = _first_part
) -> dict[str, list[str]]:
    """Sort the names of files or of splits by the split that they stand for.

    Names that stand for no split are ignored. The files of a split differ only in a number.
    Examples of names: `validation`, `train.jsonl.gz`, `train-00000-of-00002.parquet` as on the hub,
    `train_2.csv`, `dev.csv`, `test_matched.csv`.

    Args:
        names: The names.
        where: The directory or data set that holds the names, for the error.
        part_of: Returns the part of a name that may be a split.

    Raises:
        UsageError: One split has two names, such as `dev` and `validation`, or files of two
            formats or versions.
    """
    by_split: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    for name in names:
        parts = SPLIT.fullmatch(part_of(name))
        if parts is None:
            continue
        word = parts[1]
        split = OTHER_NAMES.get(word, word) + (parts[2] or "")
        of_split = by_split.setdefault(split, [])
        if words.setdefault(split, word) != word:
            raise UsageError(
                f"{where} has two names for the {split} split: {of_split[0]} and {name}",
                "rename or remove one of them",
            )
        plain = _unpacked_name(name)
        others = {other: _unpacked_name(other) for other in of_split}
        twins = [
            other
            for other, unpacked in others.items()
            if unpacked == plain or PART_NUMBER.sub("", unpacked) != PART_NUMBER.sub("", plain)
        ]
        if twins:
            raise UsageError(
                f"{where} has two files for the {split} split, {twins[0]} and {name}, whose names "
                "do not differ in a number alone",
                f"move one of them away, or number the parts: {word}-1.csv, {word}-2.csv ...",
            )
        of_split.append(name)
    return by_split
