"""Documents from a source: text, jsonl, csv or parquet (each also gzipped), a directory of them, a hub id, or `demo`.

Everything streams; no file is held whole: a .parquet.gz is unpacked to a temporary file. A line of a .txt file is a
document; the other formats hold a document a row: in the given column, else in `text`, else in the only column of
strings. Blank and null documents are skipped.
"""

import codecs
import csv
import functools
import gzip
import itertools
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kdcli.data.demo import demo_documents, demo_identity
from kdcli.disk import user_path
from kdcli.errors import UsageError

CONLL = ("conll", "conllu", "bio", "iob", "iob2")
CONLL_HINT = (
    'make a row a sentence of it, {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, as docs/tasks.md shows'
)
FORMATS = ("txt", "jsonl", "csv", "parquet")
SPLIT = re.compile(r"(train|validation|test)(_[a-z]+)?")
PARQUET_ROWS = 128
UNPACK_BYTES = 1 << 20
MOST_LINE = 1 << 25  # Bytes of a line; a gzip file of 100 kB may hold one of 100 MB
NAMES_LISTED = 12
LOG_SECONDS = 10.0  # Between log lines of progress.

Log = Callable[[str], None]
Row = tuple[str, Mapping[str, Any]]  # where it stands (`file:line`), and its columns


class NotFound(UsageError):
    """No such data; a caller that knows what it was for adds what should be there."""


class BadRow(UsageError):
    """A row that cannot be used. `where` it stands; `problem` is alike for all rows of one kind, `detail` need not."""

    def __init__(self, where: str, problem: str, detail: str = "", hint: str | None = None) -> None:
        super().__init__(f"{where}{'' if problem.startswith((' ', ':')) else ': '}{problem}{detail}", hint)
        self.where, self.problem = where, problem


Bad = Callable[[BadRow], None]  # takes a bad row, which is then left out, or raises it


def refuse(row: BadRow) -> None:
    """Raise the first bad row."""
    raise row


@dataclass(frozen=True)
class Source:
    """Where documents come from: local files by split, or a hub data set, or the embedded demo."""

    name: str
    files: Mapping[str, tuple[Path, ...]]
    hub: tuple[str, str | None] | None = None

    @property
    def identity(self) -> list[Any]:
        """JSON that changes whenever the documents may have changed."""
        if self.hub:
            return ["hub", *self.hub]
        if not self.files:
            return ["demo", demo_identity()]
        stats = [(s, str(f.resolve()), f.stat()) for s, files in self.files.items() for f in files]
        return [[split, path, stat.st_size, stat.st_mtime_ns] for split, path, stat in stats]

    def has(self, split: str) -> bool:
        """True if there is such a split."""
        return split in _hub_splits(*self.hub) if self.hub else split in self.files or not self.files

    def documents(self, split: str, column: str | None) -> Iterator[str]:
        """The documents of a split, blank ones left out; a UsageError names the file and line that are wrong."""
        if not self.files and not self.hub:
            yield from demo_documents(split)
            return
        for name, rows in self.tables(split):
            text = None
            for text in _texts(rows, column):
                yield text
            if text is None:
                raise UsageError(f"{name} holds no text")

    def tables(self, split: str, bad: Bad = refuse) -> Iterator[tuple[str, Iterator[Row]]]:
        """The name and the rows of each file of a split; `NotFound` for no such split. `bad` gets the lines that hold
        no row. Iterating raises a UsageError that names the file that cannot be read."""
        if self.hub:
            if not self.has(split):
                raise UsageError(f"{self.name} has no {split} split; it has {', '.join(_hub_splits(*self.hub))}")
            yield f"{self.name} {split}", _hub_rows(*self.hub, split)
            return
        if split not in self.files:
            raise NotFound(f"{self.name} has no {split} split; it has {', '.join(self.files) or 'none'}")
        for file in self.files[split]:
            yield str(file), _rows(file, bad)


def open_source(source: str) -> Source:
    """Resolve a `--data` value; a UsageError for a file of another format, `NotFound` for no such data."""
    if source == "demo":
        return Source(source, {})
    path, endings = user_path(source), ", ".join(f".{f}" for f in FORMATS)
    if path.is_file():
        if is_conll(path):
            raise UsageError(f"{path} is CoNLL text, which is not read", CONLL_HINT)
        if not _format(path):
            raise UsageError(f"{path} has no known format; known: {endings}, each also .gz")
        return Source(source, {"train": (path,)})
    if path.is_dir():
        known = sorted(p for p in path.iterdir() if p.is_file() and _format(p) and not p.name.startswith("."))
        named = {s: tuple(p for p in known if _split(p) == s) for s in dict.fromkeys(map(_split, known)) if s}
        if not known and any(map(is_conll, path.iterdir())):
            raise UsageError(f"{path} holds CoNLL text, which is not read", CONLL_HINT)
        if not known:
            hint = f"it should hold train.* and perhaps validation.* with one of {endings} (or .gz of these)"
            raise NotFound(f"{path} has no file of a known format; it holds {held_by(path)}", hint)
        return Source(source, named or {"train": tuple(known)})
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        hint = "give a file, a directory, a hub id like owner/name[:config], or 'demo'"
        raise NotFound(f"no data at {source}{_beside(source)}", hint)
    name, _, config = source.partition(":")
    return Source(source, {}, (name, config or None))


def is_conll(path: Path, line: str = "") -> bool:
    """Whether a file is CoNLL text, a word and its tags a line: by its ending, or by its first line."""
    tagged = re.fullmatch(r"-DOCSTART-.*|\S+(?:[ \t]+\S+)*[ \t]+(?:O|[BIES]-\S+)", line.strip())
    return bool(tagged) or path.name.removesuffix(".gz").rsplit(".", 1)[-1] in CONLL


def _beside(source: str) -> str:
    """What the directory of a missing file holds, for messages."""
    folder = user_path(source).parent
    return f"; {folder} holds {held_by(folder)}" if "/" in source and folder.is_dir() else ""


def held_by(folder: Path) -> str:
    """What a directory holds, for messages."""
    names = sorted(f"{p.name}{'/' if p.is_dir() else ''}" for p in folder.iterdir() if not p.name.startswith("."))
    return (", ".join(names[:NAMES_LISTED]) or "nothing") + (" ..." if len(names) > NAMES_LISTED else "")


def _split(path: Path) -> str | None:
    """The split of a file: `train.jsonl.gz`, `train-00000-of-00002.parquet` of the hub, `test_matched.csv`."""
    stem = path.name.split(".")[0].split("-")[0]
    return stem if SPLIT.fullmatch(stem) else None


def _format(path: Path) -> str | None:
    ending = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
    return ending if ending in FORMATS else None


def _texts(rows: Iterator[Row], column: str | None) -> Iterator[str]:
    for where, row in rows:
        if column is None:
            strings = [k for k, v in row.items() if isinstance(v, str)]
            if "text" not in row and len(strings) != 1:
                raise UsageError(f"{where}: which column is the text? there are {', '.join(row)}", "set data.column")
            column = "text" if "text" in row else strings[0]
        value = row.get(column)
        if column not in row or not isinstance(value, str | None):
            wrong = f"holds {type(value).__name__}" if column in row else f"is not there; there are {', '.join(row)}"
            raise UsageError(f"{where}: column '{column}' {wrong}", "set data.column to the column of the text")
        if value and not value.isspace():
            yield whole_text(where, column, value)


def whole_text(where: str, column: str, text: str) -> str:
    """The text itself; a UsageError if it holds half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(where, "half a surrogate pair", f" at character {error.start} of '{column}'") from None
    return text


def _rows(path: Path, bad: Bad) -> Iterator[Row]:
    readers = {"txt": _txt, "jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from readers[str(_format(path))](path, file, bad)  # type: ignore[arg-type]  # GzipFile reads like any file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {_one_line(error)}") from None


def _lines(path: Path, file: IO[bytes], bad: Bad) -> Iterator[tuple[int, str]]:
    for number in itertools.count(1):
        if not (line := file.readline(MOST_LINE + 1)):
            return
        if len(line) > MOST_LINE:
            raise UsageError(f"{path}:{number} is longer than {MOST_LINE:,} bytes", "put one document on each line")
        try:
            yield number, (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")
        except UnicodeDecodeError as error:
            bad(BadRow(f"{path}:{number}", " is not UTF-8", f" (byte {error.start} of the line)"))


def _txt(path: Path, file: IO[bytes], bad: Bad) -> Iterator[Row]:
    return ((f"{path}:{number}", {"text": line.strip()}) for number, line in _lines(path, file, bad))


def _jsonl(path: Path, file: IO[bytes], bad: Bad) -> Iterator[Row]:
    for number, line in _lines(path, file, bad):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(BadRow(f"{path}:{number}", " is not JSON", f": {error}"))
            continue
        if not isinstance(row, dict):
            bad(BadRow(f"{path}:{number}", " must be a JSON object", f", got {type(row).__name__}"))
            continue
        yield f"{path}:{number}", row


def _csv(path: Path, file: IO[bytes], bad: Bad) -> Iterator[Row]:
    csv.field_size_limit(MOST_LINE)
    reader = csv.DictReader(line for _, line in _lines(path, file, bad))
    try:
        for row in reader:
            if None in row or None in row.values():
                wrong = f" does not have the {len(reader.fieldnames or ())} columns"
                bad(BadRow(f"{path}:{reader.line_num}", wrong))
                continue
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num} is not CSV: {error}") from None


def _parquet(path: Path, file: IO[bytes], bad: Bad) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with tempfile.TemporaryFile() as unpacked:
            if path.suffix == ".gz":
                # Parquet is read from its end, which a gzip stream can only reach by unpacking all of it.
                shutil.copyfileobj(file, unpacked, UNPACK_BYTES)
            table = pq.ParquetFile(unpacked if path.suffix == ".gz" else file)
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except UnicodeDecodeError:
        raise UsageError(f"{path}: one of the rows {number + 1} to {number + PARQUET_ROWS} is not UTF-8") from None
    except pa.ArrowException as error:
        raise UsageError(f"{path} is not a whole parquet file: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@functools.cache
def _hub_splits(name: str, config: str | None) -> list[str]:
    import datasets

    with _hub_errors(name, config):
        return list(datasets.get_dataset_split_names(name, config))


def _hub_rows(name: str, config: str | None, split: str) -> Iterator[Row]:
    import datasets

    with _hub_errors(name, config):
        stream = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(stream, 1):
            yield f"{name} {split} row {number}", row


@contextmanager
def _hub_errors(name: str, config: str | None) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotFound(
            f"data '{name}{':' + config if config else ''}' is neither a file nor a directory and cannot be had from "
            f"the hub: {reason}{_beside(name)}",
            "offline, give --data a file or directory (.txt, .jsonl, .csv, .parquet), or try --data demo",
        ) from None
