"""Read the rows of files by the endings of their names, also packed ones.

Files are streamed, so memory does not grow with their size, except for JSON files that are one
value. Large files can be cut into pieces, which several processes read at once.
"""

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from kdcli.data import conll
from kdcli.data.accounts import EMPTY, RowAccount
from kdcli.data.annotations import rows_of_json
from kdcli.data.delimited import read_delimited
from kdcli.data.rows import (
    BadRow,
    BlankLine,
    OnBadRow,
    Piece,
    Row,
    check_encodable,
    columns_in,
    names_in,
    raise_bad_row,
    share_of,
    take_first,
    usual_text_column,
)
from kdcli.data.storage import File, as_file, base_name, check_size, file_stat, open_binary
from kdcli.data.tables import read_table, table_errors, table_share
from kdcli.errors import UsageError, one_line

FORMATS = ("txt", "jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", *conll.ENDINGS)
PACKED = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}
TABLES = ("parquet", "arrow")
CUT_ANYWHERE = ("txt", "jsonl", "ndjson")  # Files that can be cut at the end of any line.
MAX_LINE_BYTES = 1 << 25  # A gzip file of 100 kB may hold a line of 100 MB.
MAX_JSON_BYTES = 1 << 28  # Of a JSON file that is one value.
JSON_HINT = (
    'write an object such as {"text": "..."} on each line of a .jsonl file (jq -c . FILE does); a '
    "file that is one list ends in .json"
)
SIGNATURE_BYTES = 32
# The first bytes of files -> the format, and what to do if the name of the file has another one.
SIGNATURES = {
    b"version https://git-lfs": ("a git-lfs pointer", "run git lfs pull in its directory"),
    b"<!DOCTYPE html": ("a web page", "download the file itself, not the page that shows it"),
    b"PK\x03\x04": ("a zip file", "end its name in .zip; save a spreadsheet as .csv"),
    b"%PDF-": ("a PDF", "save its text as .txt"),
    b"\xd0\xcf\x11\xe0": ("an old Excel or Word file", "save it as .csv or .txt"),
    b"SQLite format 3": ("an SQLite database", "save a table as .csv"),
    b"\x1f\x8b": ("gzip", "end its name in .gz"),
    b"BZh91AY": ("bzip2", "end its name in .bz2"),
    b"\xfd7zXZ": ("xz", "end its name in .xz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "end its name in .zst"),
    b"PAR1": ("parquet", "end its name in .parquet"),
    b"ARROW1": ("arrow", "end its name in .arrow"),
}


class FileFormat(NamedTuple):
    """The format of a file, one of `FORMATS`, and how it is packed: a key of `PACKED`, or ""."""

    name: str
    packed: str


def format_of(name: str) -> FileFormat | None:
    """Return the format of a file by the ending of its name, in upper or lower case.

    The result is None if the format is not in `FORMATS`.
    """
    rest, dot, packed = name.lower().rpartition(".")
    if packed not in PACKED:
        rest, packed = name.lower(), ""
    _, dot, ending = rest.rpartition(".")
    return FileFormat(ending, packed) if dot and ending in FORMATS else None


def cut_file(file: File, max_bytes: int) -> list[Piece]:
    """Cut a file into pieces of about `max_bytes`. Some formats can only be read as a whole."""
    form, (_, size, version) = format_of(base_name(file)), file_stat(file)
    # An empty file is one piece.
    count = max(1, -(-size // max_bytes))
    total = size
    if form == FileFormat("parquet", "") and count > 1:
        import pyarrow.parquet as pq

        with open_binary(file) as opened, table_errors(file, "parquet"):
            total = pq.ParquetFile(opened).num_row_groups
        count = min(count, total)
    elif form is None or form.packed or form.name not in CUT_ANYWHERE:
        count = 1
    if count < 2:
        return [Piece(str(file), size=size, version=version)]
    ends = [total * n // count for n in range(count + 1)]
    return [
        Piece(str(file), begin, end, size // count, version)
        for begin, end in itertools.pairwise(ends)
    ]


def read_rows(
    piece: Piece, on_bad: OnBadRow = raise_bad_row, *, lines_before: int = 0
) -> Iterator[Row]:
    """Read the rows of a piece.

    Args:
        piece: A file, or a part of one.
        on_bad: Called with every line that is not a row.
        lines_before: The number of lines before the piece, for the places in errors.

    Raises:
        UsageError: The file cannot be read or is damaged, or a line is too long; or from `on_bad`.
    """
    try:
        with open_binary(as_file(piece.name)) as file:
            yield from rows_in(piece, file, on_bad, lines_before)
    except OSError as error:
        raise UsageError(f"{piece.name} cannot be read: {one_line(error)}") from None


def rows_in(
    piece: Piece, file: IO[bytes], on_bad: OnBadRow = raise_bad_row, lines_before: int = 0
) -> Iterator[Row]:
    """Read the rows of a piece of an open file; see `read_rows`."""
    return share_of(_all_rows_in(piece, file, on_bad, lines_before), piece.share, on_bad)


def _all_rows_in(
    piece: Piece, file: IO[bytes], on_bad: OnBadRow, lines_before: int
) -> Iterator[Row]:
    form = format_of(base_name(piece.name))
    assert form is not None
    _check_signature(piece, file, form)
    try:
        unpacked = _unpacked(piece.name, file, form.packed)
        if form.name in TABLES:
            yield from read_table(piece, unpacked, form.name, packed=bool(form.packed))
        elif form.name == "json":
            yield from _read_json(piece.name, unpacked, form, on_bad)
        else:
            lines = _decoded_lines(piece, unpacked, form, on_bad, lines_before)
            yield from _read_lines(form.name, piece.name, lines, on_bad)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # Errors of the system have a number.
        if not form.packed or getattr(error, "errno", None) is not None:
            raise
        kind = PACKED[form.packed]
        raise UsageError(f"{piece.name} is not a whole {kind} file: {one_line(error)}") from None


def _check_signature(piece: Piece, file: IO[bytes], form: FileFormat) -> None:
    """Raise a UsageError if a file begins as one of another format does."""
    if piece.begin or not isinstance(file, io.BufferedReader):
        return
    begin = file.peek(SIGNATURE_BYTES)
    for signature, (kind, hint) in SIGNATURES.items():
        if begin.startswith(signature) and kind not in (form.name, PACKED.get(form.packed)):
            raise UsageError(f"{piece.name} is {kind}, as its first bytes show", hint)


def _unpacked(name: str, file: IO[bytes], packed: str) -> IO[bytes]:
    """Open the content of a packed file."""
    if not packed:
        return file
    return io.BufferedReader(_Unpacked(name, file, _OPENERS[packed](file)))


def _open_zstd(file: IO[bytes]) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")


_OPENERS: Mapping[str, Callable[[IO[bytes]], Any]] = {
    "gz": lambda file: gzip.GzipFile(fileobj=file),
    "bz2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zst": _open_zstd,
}


class _Unpacked(io.RawIOBase):
    """The content of a packed file, as long as it is not much larger than the file."""

    def __init__(self, name: str, packed: IO[bytes], content: Any) -> None:
        self.name, self.packed, self.content = name, packed, content
        self.size = 0

    def readable(self) -> bool:
        """Return true, as `io.BufferedReader` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Unpack the next bytes into a buffer."""
        data = self.content.read(len(buffer))
        buffer[: len(data)] = data
        self.size += len(data)
        check_size(self.name, self.packed.tell(), self.size)
        return len(data)


def _read_lines(
    kind: str, name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow
) -> Iterator[Row]:
    """Read the rows of a format with lines. The lines of a txt file are rows, except blank ones."""
    if kind == "txt":
        return _read_text(name, lines, on_bad)
    if kind in ("csv", "tsv"):
        # Without a limit, an open quote would read the rest of the file as one cell.
        csv.field_size_limit(MAX_LINE_BYTES)
        return read_delimited(kind, name, lines, on_bad)
    if kind in conll.ENDINGS:
        return conll.read_conll(name, lines, on_bad)
    return _read_jsonl(name, lines, on_bad)


def _read_text(name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow) -> Iterator[Row]:
    for number, line in lines:
        where, text = f"{name}:{number}", line.strip()
        if "\r" in text:
            problem = "a carriage return within the line"
            on_bad(BadRow(where, problem, hint=_return_hint(name)))
        elif text:
            yield Row(where, {"text": text})
        else:
            on_bad(BlankLine(where))


def _return_hint(name: str) -> str:
    """Return the command that replaces the carriage returns of a file on this machine."""
    hint, form = "if it ends a line, replace it by a line feed", format_of(base_name(name))
    if "://" in name or form is None or form.packed:
        return hint
    fixed = shlex.quote(f"fixed-{base_name(name)}")
    return f"{hint}: tr '\\r' '\\n' < {shlex.quote(name)} > {fixed}"


def count_lines_before(piece: Piece) -> int:
    """Count a file's lines before a piece; 0 for parquet, whose rows know their number."""
    form = format_of(base_name(piece.name))
    if form is not None and form.name in TABLES:
        return 0
    with open_binary(as_file(piece.name)) as file:
        return sum(1 for _ in _raw_lines(piece._replace(begin=0, end=piece.begin), file))


def _raw_lines(piece: Piece, file: IO[bytes]) -> Iterator[bytes]:
    """Read the lines that begin in a piece. Lines are cut one byte after the length limit."""
    position = 0
    if piece.begin:
        position, rest = file.seek(piece.begin - 1), b""
        # The line that is cut here belongs to the previous piece.
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            position += len(rest)
    while piece.end is None or position < piece.end:
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        position += len(line)
        yield line


def _decoded_lines(
    piece: Piece, file: IO[bytes], form: FileFormat, on_bad: OnBadRow, lines_before: int
) -> Iterator[tuple[int, str]]:
    """Number and decode the lines of a piece.

    Raises:
        UsageError: The file has another encoding or other line ends, a line is too long, or the
            names of columns are not UTF-8; or from `on_bad`.
    """
    for number, line in enumerate(_raw_lines(piece, file), lines_before + 1):
        where = f"{piece.name}:{number}"
        is_first = number == 1 and not piece.begin
        if is_first:
            _check_encoding(piece.name, form, line)
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) > MAX_LINE_BYTES:
            message = f"{where} is longer than {MAX_LINE_BYTES:,} bytes"
            raise UsageError(message, "put one document on each line")
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = BadRow(
                *(where, "not UTF-8", f" (byte {error.start} of the line)"),
                hint=_windows_hint(piece.name, form),
            )
            if is_first and form.name in ("csv", "tsv"):
                # The next line would be taken for the names of the columns.
                raise bad from None
            on_bad(bad)


def _check_encoding(name: str, form: FileFormat, line: bytes) -> None:
    """Raise a UsageError if the first line shows another encoding, or no line feed ends lines."""
    encoding = json.detect_encoding(line).upper().replace("-LE", "LE").replace("-BE", "BE")
    if not encoding.startswith("UTF-8"):
        hint = _conversion(name, form, f"iconv -f {encoding} -t UTF-8")
        raise UsageError(f"{name} is {encoding}, not UTF-8", f"convert it: {hint}")
    if not line.endswith(b"\n") and b"\r" in line.rstrip(b"\r"):
        hint = _conversion(name, form, r"tr '\r' '\n'")
        raise UsageError(
            f"{name} ends its lines with carriage returns, not line feeds", f"convert it: {hint}"
        )


def _windows_hint(name: str, form: FileFormat) -> str:
    command = _conversion(name, form, "iconv -f CP1252 -t UTF-8")
    return f"if a Windows program such as Excel wrote the file, convert it from cp1252: {command}"


def _conversion(name: str, form: FileFormat, command: str) -> str:
    """Return a command line that converts a file and keeps the old one."""
    if "://" in name:
        return command
    tool = PACKED.get(form.packed)
    pipe = f"{tool} -dc < {{}} | {command} | {tool}" if tool else f"{command} < {{}}"
    file, old = shlex.quote(name), shlex.quote(f"{name}.old")
    return f"mv {file} {old} && {pipe.format(old)} > {file}"


def _read_jsonl(name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow) -> Iterator[Row]:
    for number, line in lines:
        where = f"{name}:{number}"
        if not line.strip():
            on_bad(BlankLine(where))
            continue
        try:
            values = ONE_NAME_ONCE.decode(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            on_bad(BadRow(where, "not JSON", f": {error}", JSON_HINT))
            continue
        yield from _object_row(where, values, on_bad)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object holds '{twice}' twice")
    return values


ONE_NAME_ONCE = json.JSONDecoder(object_pairs_hook=_object)
"""Raises ValueError if an object holds a name twice. Making one takes longer than most rows."""


def _object_row(where: str, values: object, on_bad: OnBadRow) -> Iterator[Row]:
    if isinstance(values, dict):
        yield Row(where, values)
    else:
        kind = type(values).__name__
        on_bad(BadRow(where, "a row must be a JSON object", f", got {kind}", JSON_HINT))


def _read_json(name: str, file: IO[bytes], form: FileFormat, on_bad: OnBadRow) -> Iterator[Row]:
    """Read a list of rows, an object that holds one, or JSON Lines; a row's place is its number."""
    data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise UsageError(
            f"{name} is longer than {MAX_JSON_BYTES:,} bytes, and JSON is read as a whole",
            "save the rows as .jsonl, one on each line",
        )
    try:
        values = json.loads(data.removeprefix(codecs.BOM_UTF8), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        problem = f"{name}: not UTF-8 (byte {error.start} of the file)"
        raise UsageError(problem, _windows_hint(name, form)) from None
    except (ValueError, RecursionError) as error:
        if not data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            line = getattr(error, "lineno", 1)
            raise UsageError(f"{name}:{line}: not JSON: {one_line(error)}") from None
        lines = _decoded_lines(Piece(name), io.BytesIO(data), form, on_bad, 0)
        yield from _read_jsonl(name, lines, on_bad)
        return
    if not isinstance(values, list | dict):
        raise UsageError(f"{name} holds {type(values).__name__}, not a list of rows")
    rows = rows_of_json(name, values)
    for number, row in enumerate(rows, 1):
        yield from _object_row(f"{name}:{number}", row, on_bad)


LONG_NAME = 6
"""Number of words from which on the name of a column is taken for a text."""
COLUMN_HINT = "name the column of the text"
"""A hint to which the command adds its option."""
SAMPLE_BYTES = 1 << 18  # Size of a sample.


class Sample(NamedTuple):
    """Documents from the beginning of a piece, and the number of bytes that they take."""

    texts: list[str]
    size: int


def texts_of(rows: Iterable[Row], column: str | None) -> Iterator[str]:
    """Yield the text of each row, except for rows with blank or null text; see `placed_texts`."""
    return (text for _, text in placed_texts(rows, column) if text)


def placed_texts(rows: Iterable[Row], column: str | None) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each row; the text is "" if it is blank or null.

    Args:
        rows: Rows of one source.
        column: The column of the text; if None, `text_column` chooses it by the first rows.

    Raises:
        UsageError: A row without the column, or with a value in it that is not text.
    """
    if column is None:
        first, rows = take_first(rows)
        if not first:
            return
        column = text_column(first)
    for where, values in rows:
        if column not in values:
            problem = f"there is no column '{column}'; {columns_in(values)}"
            raise UsageError(f"{where}: {problem}", COLUMN_HINT)
        text = values[column]
        if not isinstance(text, str | None):
            problem = f"column '{column}' holds {type(text).__name__}, not text"
            raise UsageError(f"{where}: {problem}", COLUMN_HINT)
        if text and not text.isspace():
            yield where, check_encodable(where, column, text)
        else:
            yield where, ""


def counted_documents(
    rows: Iterable[Row], column: str | None, account: RowAccount
) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each row that is not empty; `account` counts the rows."""
    for where, text in placed_texts(rows, column):
        account.read += 1
        if text:
            yield where, text
        else:
            account.leave_out(EMPTY, where)


def check_header(rows: Sequence[Row]) -> None:
    """Raise a UsageError if the first line of a CSV or TSV file is a text and no names."""
    file = rows[0].where.rpartition(":")[0]
    long = [name for name in names_in(rows) if len(name.split()) >= LONG_NAME]
    if long and (hint := header_hint(file)):
        raise UsageError(
            f"{file}:1 looks like a row, but it must name the columns: {long[0]!r}",
            f"{hint}; if it has names, {COLUMN_HINT}",
        )


def header_hint(file: str) -> str:
    """How to name the columns of a CSV or TSV file; empty for other files."""
    form = format_of(base_name(file))
    if form is None or form.name not in ("csv", "tsv"):
        return ""
    return (
        "if line 1 is a row, name the columns in a line above it, with the separator of the "
        "other lines, such as text,label"
    )


def text_column(rows: Sequence[Row]) -> str:
    """Choose the column of the text: `text`, another usual name, or the only column of strings."""
    check_header(rows)
    column = usual_text_column(rows)
    if column is None:
        where, names = rows[0].where, names_in(rows)
        message = f"{where}: which column holds the text? {columns_in(names)}"
        raise UsageError(message, COLUMN_HINT)
    return column


def read_documents(piece: Piece, column: str | None, account: RowAccount) -> Iterator[str]:
    """Yield the documents of a piece that was cut from a file; `account` counts the rows."""
    if column is None:
        # The first rows of a piece may have other null columns than the first rows of the file.
        first, _ = take_first(read_rows(Piece(piece.name)))
        column = text_column(first) if first else None
    try:
        rows = read_rows(piece, account.on_bad)
        yield from (text for _, text in counted_documents(rows, column, account))
    except UsageError:
        # The error needs the number of the line in the file, so read the piece again with it.
        rows = read_rows(piece, lines_before=count_lines_before(piece))
        for _ in texts_of(rows, column):
            pass
        raise


def first_texts(documents: Iterable[str]) -> Sample:
    """Take documents of about `SAMPLE_BYTES`. The size is the number of bytes of their text."""
    texts, size = [], 0
    for text in documents:
        texts.append(text)
        size += len(text.encode())
        if size > SAMPLE_BYTES:
            break
    return Sample(texts, size)


def sample_documents(piece: Piece, column: str | None) -> Sample:
    """Take documents from the beginning of a piece of a file, and skip lines that are not rows."""
    form = format_of(base_name(piece.name))
    with open_binary(as_file(piece.name)) as file:
        rows = rows_in(piece, file, lambda error: None)
        texts, size = first_texts(texts_of(rows, column))
        read = file.tell() - piece.begin
    if form == FileFormat("parquet", ""):
        read = int(piece.size * table_share(piece, len(texts)) / piece.share)
    elif form is not None and (form.name in TABLES or form.name == "json"):
        # The file is read or unpacked as a whole.
        read = int(size / piece.share)
    return Sample(texts, min(piece.size, read))
