"""Documents from a source: files of `kdcli.data.formats`, a directory of them, here or at a URL (`hf://`, `s3://`,
`https://`); a data set of the hub, `owner/name[:config][:split][@revision]`; or `demo`.

A line of a .txt file is a document; the other formats hold a document a row: in the given column, else in `text`, else
in the only column of strings. Blank and null documents are skipped.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdcli.data.demo import demo_documents, demo_identity
from kdcli.data.formats import (
    FORMATS,
    NAMES_LISTED,
    Bad,
    File,
    NotFound,
    Piece,
    Row,
    as_file,
    beside,
    documents_of,
    first_texts,
    format_of,
    held_by,
    name_of,
    pieces_of,
    refuse,
    remote_errors,
    rows_of,
    sample_of,
    stat_of,
    texts_of,
)
from kdcli.data.hub import HUB_ID, HubId, hub_rows, hub_size, hub_splits
from kdcli.disk import user_path
from kdcli.errors import UsageError

CONLL = ("conll", "conllu", "bio", "iob", "iob2")
CONLL_HINT = 'make a row a sentence of it, {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, as docs/tasks.md shows'
SPLIT = re.compile(r"(train|validation|test)(_[a-z]+)?")
LOG_SECONDS = 10.0  # Between log lines of progress.

Log = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """Where documents come from: files by split, or a hub data set, or the embedded demo."""

    name: str
    files: Mapping[str, tuple[File, ...]]
    hub: HubId | None = None

    @property
    def identity(self) -> list[Any]:
        """JSON that changes whenever the documents may have changed."""
        if self.hub:
            return ["hub", *self.hub]
        if not self.files:
            return ["demo", demo_identity()]
        return [[split, *stat_of(file)] for split, files in self.files.items() for file in files]

    def has(self, split: str) -> bool:
        """True if there is such a split."""
        return split in hub_splits(self.hub) if self.hub else split in self.files or not self.files

    def pieces(self, split: str, most_bytes: int) -> list[Piece]:
        """The documents of a split in pieces of about `most_bytes` where files can be cut. Raises as `tables`."""
        if not self.files and not self.hub:
            return [Piece("demo", version=demo_identity())]
        self._check_split(split)
        if self.hub:
            count, size = hub_size(self.hub, split)
            return [Piece(f"{self.name} {split}", n, n + 1, size // count) for n in range(count)]
        return [piece for file in self.files[split] for piece in pieces_of(file, most_bytes)]

    def documents(self, split: str, column: str | None) -> Iterator[str]:
        """The documents of a split, blank ones left out; a UsageError names the file and line that are wrong."""
        if not self.files and not self.hub:
            yield from demo_documents(split)
            return
        for name, rows in self.tables(split):
            text = None
            for text in texts_of(rows, column):
                yield text
            if text is None:
                raise UsageError(f"{name} holds no text")

    def documents_in(self, split: str, piece: Piece, column: str | None) -> Iterator[str]:
        """As `documents`, of one of the `pieces`."""
        if self.hub:
            yield from texts_of(hub_rows(self.hub, split, piece.begin), column)
            return
        if not self.files or piece.end is None:
            one = Source(self.name, {split: (as_file(piece.name),)} if self.files else {})
            yield from one.documents(split, column)
            return
        yield from documents_of(piece, column)

    def sample(self, split: str, piece: Piece, column: str | None) -> tuple[list[str], int]:
        """Documents from the beginning of a piece, and how many of its bytes they are, 0 for unknown."""
        if self.files:
            return sample_of(piece, column)
        texts, held = first_texts(self.documents_in(split, piece, column))
        # The size of a hub data set is that of its text.
        return texts, min(piece.size, held)

    def tables(self, split: str, bad: Bad = refuse) -> Iterator[tuple[str, Iterator[Row]]]:
        """The name and the rows of each file of a split; `NotFound` for no such split. `bad` gets the lines that hold
        no row. Iterating raises a UsageError that names the file that cannot be read."""
        self._check_split(split)
        if self.hub:
            yield f"{self.name} {split}", hub_rows(self.hub, split)
            return
        for file in self.files[split]:
            yield str(file), rows_of(Piece(str(file)), bad)

    def _check_split(self, split: str) -> None:
        if not self.has(split):
            there = hub_splits(self.hub) if self.hub else self.files
            raise NotFound(f"{self.name} has no {split} split; it has {', '.join(there) or 'none'}")


def open_source(source: str) -> Source:
    """Resolve a `--data` value. Raises UsageError: a file of another format; a URL that cannot be read; `NotFound`: no
    such data."""
    if source == "demo":
        return Source(source, {})
    if "://" in source:
        return Source(source, _remote_files(source))
    path = user_path(source)
    if path.is_file():
        _check_format(path, path.name)
        return Source(source, {"train": (path,)})
    if path.is_dir():
        held = sorted(p for p in path.iterdir() if p.is_file())
        return Source(source, _by_split(path, {p.name: p for p in held}, held_by(path)))
    hub = HUB_ID.fullmatch(source)
    if hub is None or source.startswith((".", "/", "~")) or format_of(source):
        hint = "give a file, a directory, a URL, a hub id like owner/name[:config][:split][@revision], or 'demo'"
        raise NotFound(f"no data at {source}{beside(source)}", hint)
    return Source(source, {}, HubId(hub[1], hub[2] or None, hub[3], hub[4]))


def _check_format(file: File, name: str) -> None:
    if is_conll(Path(name)):
        raise UsageError(f"{file} is CoNLL text, which is not read", CONLL_HINT)
    if not format_of(name):
        endings = ", ".join(f".{f}" for f in FORMATS)
        raise UsageError(f"{file} has no known format; known: {endings}, each also .gz")


def _by_split(folder: File, files: Mapping[str, File], held: str) -> dict[str, tuple[File, ...]]:
    """The files of a directory, given by their names, that can be read, by the split that they name."""
    known = [name for name in sorted(files) if format_of(name) and not name.startswith(".")]
    named = {
        s: tuple(files[n] for n in known if _split(n) == s)
        for s in dict.fromkeys(map(_split, known))
        if s
    }
    if not known and any(is_conll(Path(name)) for name in files):
        raise UsageError(f"{folder} holds CoNLL text, which is not read", CONLL_HINT)
    if not known:
        endings = ", ".join(f".{f}" for f in FORMATS)
        hint = f"it should hold train.* and perhaps validation.* with one of {endings} (or .gz of these)"
        raise NotFound(f"{folder} has no file of a known format; it holds {held}", hint)
    return named or {"train": tuple(files[name] for name in known)}


def _remote_files(url: str) -> dict[str, tuple[File, ...]]:
    """The files at a URL, which names one or a directory, by split."""
    import fsspec

    with remote_errors(url):
        system, path = fsspec.core.url_to_fs(url)
        # A web server has no directories.
        if format_of(name_of(url)) or "http" in url.split("://")[0] or not system.isdir(path):
            _check_format(url, name_of(url))
            system.info(path)
            return {"train": (url,)}
        found = [each["name"] for each in system.ls(path, detail=True) if each["type"] == "file"]
        files: dict[str, File] = {name_of(each): system.unstrip_protocol(each) for each in found}
        return _by_split(url, files, ", ".join(sorted(files)[:NAMES_LISTED]) or "nothing")


def is_conll(path: Path, line: str = "") -> bool:
    """Whether a file is CoNLL text, a word and its tags a line: by its ending, or by its first line."""
    tagged = re.fullmatch(r"-DOCSTART-.*|\S+(?:[ \t]+\S+)*[ \t]+(?:O|[BIES]-\S+)", line.strip())
    return bool(tagged) or path.name.removesuffix(".gz").rsplit(".", 1)[-1] in CONLL


def _split(name: str) -> str | None:
    """The split of a file: `train.jsonl.gz`, `train-00000-of-00002.parquet` of the hub, `test_matched.csv`."""
    stem = name.split(".")[0].split("-")[0]
    return stem if SPLIT.fullmatch(stem) else None
