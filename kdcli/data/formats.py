"""Rows of a file, here or at a URL that fsspec reads: txt, jsonl, csv, tsv or parquet, each also gzipped.

Everything streams; no file is held whole: a .parquet.gz is unpacked to a temporary file. Large files are read in
pieces, which several processes can share.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from kdcli.disk import user_path
from kdcli.errors import UsageError, one_line

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
PARQUET_ROWS = 128
UNPACK_BYTES = 1 << 20
MOST_LINE = 1 << 25  # Bytes of a line; a gzip file of 100 kB may hold one of 100 MB
NAMES_LISTED = 12
NO_COLUMN = "set data.column (--column of `kdcli tokenize`) to the column of the text"
SAMPLE_BYTES, MOST_UNPACKED = 1 << 18, 1 << 22  # Of a piece
# What file systems call that which changes with a file's content, the first that one has.
VERSIONS = ("ETag", "blob_id", "oid", "LastModified", "last_modified", "mtime")

Row = tuple[str, Mapping[str, Any]]  # where it stands (`file:line`), and its columns
File = Path | str  # here, or a URL


class NotFound(UsageError):
    """No such data; a caller that knows what it was for adds what should be there."""


class BadRow(UsageError):
    """A row that cannot be used. `where` it stands; `problem` is alike for all rows of one kind, `detail` need not."""

    def __init__(self, where: str, problem: str, detail: str = "", hint: str | None = None) -> None:
        super().__init__(
            f"{where}{'' if problem.startswith((' ', ':')) else ': '}{problem}{detail}", hint
        )
        self.where, self.problem = where, problem


Bad = Callable[[BadRow], None]  # takes a bad row, which is then left out, or raises it


def refuse(row: BadRow) -> None:
    """Raise the first bad row."""
    raise row


class Piece(NamedTuple):
    """What is read on its own: lines that begin in a range of bytes, row groups of a .parquet file, a shard of a hub
    data set; a whole file if `end` is None. `size`: about how many bytes that is, 0 for unknown; `version` changes with
    the content."""

    name: str
    begin: int = 0
    end: int | None = None
    size: int = 0
    version: str = ""


def held_by(folder: Path) -> str:
    """What a directory holds, for messages."""
    names = sorted(
        f"{p.name}{'/' if p.is_dir() else ''}"
        for p in folder.iterdir()
        if not p.name.startswith(".")
    )
    return (", ".join(names[:NAMES_LISTED]) or "nothing") + (
        " ..." if len(names) > NAMES_LISTED else ""
    )


def beside(source: str) -> str:
    """What the directory of a missing file holds, for messages."""
    folder = user_path(source).parent
    return f"; {folder} holds {held_by(folder)}" if "/" in source and folder.is_dir() else ""


def as_file(name: str) -> File:
    """A path, or a URL as it is."""
    return name if "://" in name else Path(name)


def name_of(file: File) -> str:
    """The last part of a path or URL."""
    return (
        file.name if isinstance(file, Path) else file.split("?")[0].rstrip("/").rsplit("/", 1)[-1]
    )


def format_of(name: str) -> str | None:
    """One of `FORMATS`, from the ending; None for another."""
    _, dot, ending = name.removesuffix(".gz").rpartition(".")
    return ending if dot and ending in FORMATS else None


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Turn whatever a file system of fsspec raises into a UsageError that names the URL."""
    hint = "is the address right, and are you logged in? `hf auth login` (hf://), AWS_ACCESS_KEY_ID ... (s3://)"
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        missing = re.search(r"[iI]nstall (?:[\"'`]?)([\w-]+)", str(error))
        package = missing[1] if missing else str(error.name)
        raise UsageError(
            f"{url} cannot be read: {package} is not installed", f"pip install {package}"
        ) from None
    except FileNotFoundError as error:
        # What a web server said is the cause.
        if error.__cause__ is not None and getattr(error.__cause__, "status", None) != 404:
            raise UsageError(f"{url} cannot be read: {one_line(error.__cause__)}", hint) from None
        raise NotFound(f"no data at {url}", hint) from None
    except Exception as error:  # noqa: BLE001  # The libraries behind it raise classes of their own.
        raise UsageError(
            f"{url} cannot be read: {one_line(error) or type(error).__name__}", hint
        ) from None


def stat_of(file: File) -> tuple[str, int, Any]:
    """A file's full name, its size in bytes, 0 if unknown, and what changes with its content."""
    if isinstance(file, Path):
        stat = file.stat()
        return str(file.resolve()), stat.st_size, stat.st_mtime_ns
    import fsspec

    with remote_errors(file):
        system, path = fsspec.core.url_to_fs(file)
        info = system.info(path)
    return (
        file,
        info.get("size") or 0,
        next((str(info[key]) for key in VERSIONS if info.get(key)), ""),
    )


@contextmanager
def _opened(file: File) -> Iterator[IO[bytes]]:
    if isinstance(file, Path):
        with file.open("rb") as here:
            yield here
        return
    import fsspec

    with remote_errors(file), fsspec.open(file, "rb") as there:
        # Its own files read no more than a line, however long.
        yield io.BufferedReader(there)


def pieces_of(file: File, most_bytes: int) -> list[Piece]:
    """A file in pieces of about `most_bytes`, or whole if its format cannot be cut."""
    _, size, version = stat_of(file)
    # An empty file is one piece.
    parts = max(1, -(-size // most_bytes))
    ends = [size * n // parts for n in range(parts + 1)]
    if parts > 1 and name_of(file).endswith(".parquet"):
        import pyarrow.parquet as pq

        with _opened(file) as opened, _parquet_errors(file):
            groups = pq.ParquetFile(opened).num_row_groups
        parts = min(parts, groups)
        ends = [groups * n // parts for n in range(parts + 1)]
    elif not name_of(file).endswith((".txt", ".jsonl")):
        parts = 1
    if parts < 2:
        return [Piece(str(file), size=size, version=str(version))]
    return [
        Piece(str(file), begin, end, size // parts, str(version))
        for begin, end in itertools.pairwise(ends)
    ]


def rows_of(piece: Piece, bad: Bad = refuse, before: int = 0) -> Iterator[Row]:
    """The rows of a piece, whose first line is number `before` + 1."""
    readers = {"txt": _txt, "jsonl": _jsonl, "csv": _csv, "tsv": _csv, "parquet": _parquet}
    name = piece.name
    try:
        with _opened(as_file(name)) as file:
            unpacked = gzip.GzipFile(fileobj=file) if name_of(name).endswith(".gz") else file
            try:
                yield from readers[str(format_of(name_of(name)))](piece, unpacked, bad, before)  # type: ignore[arg-type]  # GzipFile reads like any file
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UsageError(f"{name} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {one_line(error)}") from None


def _bytes_of_lines(piece: Piece, file: IO[bytes]) -> Iterator[bytes]:
    """The lines that begin in a piece; longer ones than `MOST_LINE` are cut."""
    at = 0
    if piece.begin:
        at, rest = file.seek(piece.begin - 1), b""
        # The rest of a line of the piece before.
        while not rest.endswith(b"\n") and (rest := file.readline(MOST_LINE)):
            at += len(rest)
    while (piece.end is None or at < piece.end) and (line := file.readline(MOST_LINE + 1)):
        at += len(line)
        yield line


def _lines(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_bytes_of_lines(piece, file), before + 1):
        where = f"{piece.name}:{number}"
        if len(line) > MOST_LINE:
            raise UsageError(
                f"{where} is longer than {MOST_LINE:,} bytes", "put one document on each line"
            )
        try:
            whole = number == 1 and not piece.begin
            yield number, (line.removeprefix(codecs.BOM_UTF8) if whole else line).decode("utf-8")
        except UnicodeDecodeError as error:
            bad(BadRow(where, " is not UTF-8", f" (byte {error.start} of the line)"))


def _lines_before(piece: Piece) -> int:
    """The lines of a file that begin before a piece of it; 0 for a .parquet file, whose rows know their number."""
    if piece.name.endswith(".parquet"):
        return 0
    with _opened(as_file(piece.name)) as file:
        return sum(1 for _ in _bytes_of_lines(piece._replace(begin=0, end=piece.begin), file))


def _txt(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    return (
        (f"{piece.name}:{number}", {"text": line.strip()})
        for number, line in _lines(piece, file, bad, before)
    )


def _jsonl(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    for number, line in _lines(piece, file, bad, before):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(BadRow(f"{piece.name}:{number}", " is not JSON", f": {error}"))
            continue
        if not isinstance(row, dict):
            bad(
                BadRow(
                    f"{piece.name}:{number}",
                    " must be a JSON object",
                    f", got {type(row).__name__}",
                )
            )
            continue
        yield f"{piece.name}:{number}", row


def _csv(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    csv.field_size_limit(MOST_LINE)
    delimiter = "\t" if format_of(name_of(piece.name)) == "tsv" else ","
    lines = (line for _, line in _lines(piece, file, bad, before))
    reader = csv.DictReader(lines, delimiter=delimiter)
    try:
        for row in reader:
            if None in row or None in row.values():
                wrong = f" does not have the {len(reader.fieldnames or ())} columns"
                bad(BadRow(f"{piece.name}:{reader.line_num}", wrong))
                continue
            yield f"{piece.name}:{reader.line_num}", row
    except csv.Error as error:
        raise UsageError(f"{piece.name}:{reader.line_num} is not CSV: {error}") from None


def _parquet(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    import pyarrow.parquet as pq

    number = 0
    try:
        with tempfile.TemporaryFile() as unpacked, _parquet_errors(piece.name):
            packed = piece.name.endswith(".gz")
            if packed:
                # Parquet is read from its end, which a gzip stream can only reach by unpacking all of it.
                shutil.copyfileobj(file, unpacked, UNPACK_BYTES)
            table = pq.ParquetFile(unpacked if packed else file)
            groups = range(table.num_row_groups)
            number = sum(
                table.metadata.row_group(group).num_rows for group in groups[: piece.begin]
            )
            for batch in table.iter_batches(
                batch_size=PARQUET_ROWS, row_groups=groups[piece.begin : piece.end]
            ):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{piece.name}:{number}", row
    except UnicodeDecodeError:
        rows = f"one of the rows {number + 1} to {number + PARQUET_ROWS}"
        raise UsageError(f"{piece.name}: {rows} is not UTF-8") from None


def _rows_of_parquet(piece: Piece) -> int:
    import pyarrow.parquet as pq

    with _opened(as_file(piece.name)) as file, _parquet_errors(piece.name):
        table = pq.ParquetFile(file)
        groups = range(table.num_row_groups)[piece.begin : piece.end]
        return max(1, sum(int(table.metadata.row_group(group).num_rows) for group in groups))


@contextmanager
def _parquet_errors(name: object) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{name} is not a whole parquet file: {one_line(error)}") from None


def texts_of(rows: Iterator[Row], column: str | None) -> Iterator[str]:
    """The texts of a column, blank ones left out; `column` None: see `_text_column`."""
    for where, row in rows:
        if column is None:
            column = _text_column(where, row)
        value = row.get(column)
        if column not in row or not isinstance(value, str | None):
            wrong = (
                f"holds {type(value).__name__}"
                if column in row
                else f"is not there; there are {', '.join(row)}"
            )
            raise UsageError(f"{where}: column '{column}' {wrong}", NO_COLUMN)
        if value and not value.isspace():
            yield whole_text(where, column, value)


def _text_column(where: str, row: Mapping[str, Any]) -> str:
    """The column of the text: `text`, or the only one of strings."""
    strings = [k for k, v in row.items() if isinstance(v, str)]
    if "text" not in row and len(strings) != 1:
        raise UsageError(
            f"{where}: which column is the text? there are {', '.join(row)}", NO_COLUMN
        )
    return "text" if "text" in row else strings[0]


def whole_text(where: str, column: str, text: str) -> str:
    """The text itself; a UsageError if it holds half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            where, "half a surrogate pair", f" at character {error.start} of '{column}'"
        ) from None
    return text


def documents_of(piece: Piece, column: str | None) -> Iterator[str]:
    """The documents of a piece that was cut from a file."""
    if column is None and (first := next(rows_of(Piece(piece.name)), None)):
        # As the whole file has it: in the first row of a piece other columns may be null.
        column = _text_column(*first)
    try:
        yield from texts_of(rows_of(piece), column)
    except UsageError:
        # Only now is it worth counting the lines before the piece, for the message.
        for _ in texts_of(rows_of(piece, before=_lines_before(piece)), column):
            pass
        raise


def first_texts(documents: Iterable[str]) -> tuple[list[str], int]:
    """Documents of about `SAMPLE_BYTES`, and their bytes."""
    texts, held = [], 0
    for text in documents:
        texts.append(text)
        if (held := held + len(text.encode())) > SAMPLE_BYTES:
            break
    return texts, held


def sample_of(piece: Piece, column: str | None) -> tuple[list[str], int]:
    """Documents from the beginning of a piece, and how many bytes of the file they are."""
    name = name_of(piece.name)
    if not name.endswith((".parquet", ".parquet.gz")):
        return _sample_of_lines(piece, column)
    texts, held = first_texts(texts_of(rows_of(piece), column))
    return texts, piece.size * len(texts) // _rows_of_parquet(piece) if name.endswith(
        ".parquet"
    ) else min(piece.size, held)


def _sample_of_lines(piece: Piece, column: str | None) -> tuple[list[str], int]:
    """Documents of the first `SAMPLE_BYTES` of a piece of lines, and how many bytes of the file they are."""
    with _opened(as_file(piece.name)) as file:
        file.seek(piece.begin)
        data = file.read(SAMPLE_BYTES)
    read = len(data)
    if name_of(piece.name).endswith(".gz"):
        unpacker = zlib.decompressobj(wbits=31)
        try:
            data = unpacker.decompress(data, MOST_UNPACKED)
        except zlib.error as error:
            raise UsageError(f"{piece.name} is not a whole gzip file: {error}") from None
        read -= len(unpacker.unused_data) + len(unpacker.unconsumed_tail)
    first = data.find(b"\n") + 1 if piece.begin else 0
    whole = data[first : data.rfind(b"\n") + 1] or data
    readers = {"txt": _txt, "jsonl": _jsonl, "csv": _csv, "tsv": _csv}
    rows = readers[str(format_of(name_of(piece.name)))](
        Piece(piece.name), io.BytesIO(whole), lambda bad: None, 0
    )
    return list(texts_of(rows, column)), read * len(whole) // max(1, len(data))
