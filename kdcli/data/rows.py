"""Read the rows of txt, jsonl, csv, tsv and parquet files, each also gzipped.

Each line of a txt file is a row, except for blank lines.

Files are streamed, so memory does not grow with their size; only a .parquet.gz file is unpacked to
a temporary file. Large files can be cut into pieces, which several processes read at once.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
import operator
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

from kdcli.data.class_names import ClassNames
from kdcli.data.storage import File, as_file, base_name, file_stat, open_binary
from kdcli.errors import UsageError, one_line

FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
CUT_ANYWHERE = (".txt", ".jsonl")  # Files that can be cut at the end of any line.
PARQUET_ROWS = 128  # Rows to decode at once.
UNPACK_BYTES = 1 << 20  # Bytes to unpack at once.
MAX_LINE_BYTES = 1 << 25  # A gzip file of 100 kB may hold a line of 100 MB.
MAX_USUAL_CELLS = 50  # A column with more different cells is no column of labels.
MANY_LINES = 4
QUOTE_HINT = "put the whole text in quotes and double the quotes in it, or save the rows as .jsonl"


RowValues = Mapping[str, Any]
"""The values of a row by column, as JSON or Parquet holds them."""


class Row(NamedTuple):
    """A row of a file: its place `where` (`file:line`), and its values by column."""

    where: str
    values: RowValues


class BadRow(UsageError):
    """A row that cannot be used.

    Attributes:
        where: the file and line.
        problem: what is wrong; rows with the same problem are counted together.
        detail: details of this row, appended to the problem.
    """

    def __init__(self, where: str, problem: str, detail: str = "", hint: str | None = None) -> None:
        super().__init__(f"{where}: {problem}{detail}", hint)
        self.where, self.problem = where, problem


OnBadRow = Callable[[BadRow], None]  # Raises the error, or records it and skips the row.


def raise_bad_row(error: BadRow) -> None:
    """Raise the error of the first bad row."""
    raise error


class Piece(NamedTuple):
    """A part of a source that is read on its own.

    Attributes:
        name: a file or URL; of a hub data set, its name and split.
        begin, end: the bytes in which the lines of the piece begin, the row groups of a parquet
            file, or the shards of a hub data set. `end` None is the end of the file.
        size: the approximate size in bytes; 0 if unknown.
        version: a value that changes with the content.
    """

    name: str
    begin: int = 0
    end: int | None = None
    size: int = 0
    version: str = ""


def format_of(name: str) -> str | None:
    """Return the format of a file by the ending of its name; None if it is not in `FORMATS`."""
    _, dot, ending = name.removesuffix(".gz").rpartition(".")
    return ending if dot and ending in FORMATS else None


def cut_file(file: File, max_bytes: int) -> list[Piece]:
    """Cut a file into pieces of about `max_bytes`. Some formats can only be read as a whole."""
    name, (_, size, version) = base_name(file), file_stat(file)
    # An empty file is one piece.
    count = max(1, -(-size // max_bytes))
    total = size
    if count > 1 and name.endswith(".parquet"):
        import pyarrow.parquet as pq

        with open_binary(file) as opened, parquet_errors(file):
            total = pq.ParquetFile(opened).num_row_groups
        count = min(count, total)
    elif not name.endswith(CUT_ANYWHERE):
        count = 1
    if count < 2:
        return [Piece(str(file), size=size, version=str(version))]
    ends = [total * n // count for n in range(count + 1)]
    return [
        Piece(str(file), begin, end, size // count, str(version))
        for begin, end in itertools.pairwise(ends)
    ]


def read_rows(
    piece: Piece, on_bad: OnBadRow = raise_bad_row, *, lines_before: int = 0
) -> Iterator[Row]:
    """Read the rows of a piece.

    Args:
        piece: a file, or a part of one.
        on_bad: called with every line that is not a row.
        lines_before: the number of lines before the piece, for the places in errors.

    Raises:
        UsageError: the file cannot be read or is damaged, or a line is too long; or from `on_bad`.
    """
    name = base_name(piece.name)
    try:
        with open_binary(as_file(piece.name)) as file:
            if name.endswith(".gz"):
                file = cast(IO[bytes], gzip.GzipFile(fileobj=file))
            try:
                if format_of(name) == "parquet":
                    yield from _read_parquet(piece, file)
                else:
                    yield from read_lines(piece, file, on_bad, lines_before)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UsageError(f"{piece.name} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"{piece.name} cannot be read: {one_line(error)}") from None


def read_lines(
    piece: Piece, file: IO[bytes], on_bad: OnBadRow = raise_bad_row, lines_before: int = 0
) -> Iterator[Row]:
    """Read the rows of a piece of a txt, jsonl, csv or tsv file that is open and unpacked."""
    lines = _decoded_lines(piece, file, on_bad, lines_before)
    kind = format_of(base_name(piece.name))
    if kind == "txt":
        texts = ((number, line.strip()) for number, line in lines)
        return (Row(f"{piece.name}:{number}", {"text": text}) for number, text in texts if text)
    if kind == "jsonl":
        return _read_jsonl(piece.name, lines, on_bad)
    # Without a limit, an open quote would read the rest of the file as one cell.
    csv.field_size_limit(MAX_LINE_BYTES)
    return (_read_tsv if kind == "tsv" else _read_csv)(piece.name, lines, on_bad)


def count_lines_before(piece: Piece) -> int:
    """Count a file's lines before a piece; 0 for parquet, whose rows know their number."""
    if piece.name.endswith(".parquet"):
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
    piece: Piece, file: IO[bytes], on_bad: OnBadRow, lines_before: int
) -> Iterator[tuple[int, str]]:
    """Number and decode the lines of a piece."""
    for number, line in enumerate(_raw_lines(piece, file), lines_before + 1):
        where = f"{piece.name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            message = f"{where} is longer than {MAX_LINE_BYTES:,} bytes"
            raise UsageError(message, "put one document on each line")
        if number == 1 and not piece.begin:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            on_bad(BadRow(where, "not UTF-8", f" (byte {error.start} of the line)"))


def _read_jsonl(name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow) -> Iterator[Row]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            on_bad(BadRow(where, "not JSON", f": {error}"))
            continue
        if isinstance(values, dict):
            yield Row(where, values)
        else:
            kind = type(values).__name__
            on_bad(BadRow(where, "a row must be a JSON object", f", got {kind}"))


def _read_csv(name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow) -> Iterator[Row]:
    """Read comma-separated rows, whose quoted cells may hold line breaks.

    A text may begin with a quote that never closes, which would join all rows up to the next quote.
    If joined lines look like rows, or are not strictly CSV, only their first line is bad, and the
    lines after it are read by themselves.
    """
    reread = _RereadLines(lines)
    reader = csv.reader(map(operator.itemgetter(1), reread))
    columns: list[str] = []
    usual: list[_UsualCells] = []
    while True:
        reread.taken.clear()
        cells: list[str] = []
        try:
            cells = next(reader, [])
            texts = [line for _, line in reread.taken]
            if sum(text.count('"') for text in texts) % 2 or len(texts) > 1:
                next(csv.reader(texts, strict=True))
            problem = "the quote that opens here joins lines that look like rows"
            is_bad = len(texts) > 1 and _look_like_rows(texts, usual)
        except csv.Error as error:
            problem, is_bad = f"not CSV: {error}", True
        if not reread.taken:
            return
        number = reread.taken[0][0]
        if is_bad:
            on_bad(BadRow(f"{name}:{number}", problem, hint=QUOTE_HINT))
            reread.taken.pop(0)
            reread.put_back()
        elif not columns:
            columns = cells
            usual = [_UsualCells() for _ in columns]
        elif len(cells) == len(columns):
            for cell, of_column in zip(cells, usual, strict=True):
                of_column.add(cell)
            yield Row(f"{name}:{reread.taken[-1][0]}", dict(zip(columns, cells, strict=True)))
        elif cells:
            on_bad(BadRow(f"{name}:{number}", f"the row does not have {len(columns)} columns"))


class _UsualCells:
    """What the cells of a column have in common: all are numbers, or there are few of them."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.are_numbers = True

    def add(self, cell: str) -> None:
        """Add a cell."""
        if len(self.values) <= MAX_USUAL_CELLS:
            self.values.add(cell)
        self.are_numbers = self.are_numbers and is_number(cell)

    @property
    def are_known(self) -> bool:
        """Whether the cells have something in common."""
        return self.are_numbers or len(self.values) <= MAX_USUAL_CELLS

    def has(self, cell: str) -> bool:
        """Whether a cell is like the others."""
        return is_number(cell) if self.are_numbers else cell in self.values


def _look_like_rows(lines: Sequence[str], usual: Sequence[_UsualCells]) -> bool:
    """Whether lines that a quote joins look like rows of their own.

    Each has the right number of cells, and the cells of a column look like its usual ones.
    """
    rows = [[cell.strip('"') for cell in line.rstrip("\r\n").split(",")] for line in lines]
    if len(usual) < 2 or any(len(row) != len(usual) for row in rows):
        return False
    known = [n for n, of_column in enumerate(usual) if of_column.values and of_column.are_known]
    if not known:
        # A text of so many lines hardly has the same number of commas in each.
        return len(lines) >= MANY_LINES
    return any(all(usual[n].has(row[n]) for row in rows) for n in known)


def _read_tsv(name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow) -> Iterator[Row]:
    """Read tab-separated rows, whose cells may be quoted.

    Many corpora, such as GLUE's files, quote nothing, so a text may begin with a quote that never
    closes. pandas and spreadsheets quote cells with a quote, a tab or a line break. Only a tab or a
    line break changes the number of cells in a line. So a line with a cell for each column is a
    row, in which a cell is quoted if it also ends in a quote. Any other line is read as CSV. If it
    is not CSV, only this line is bad, and the lines after it are read by themselves.
    """
    columns: list[str] = []
    hint = "if a text has line breaks, save the rows as .csv or .jsonl"
    reread = _RereadLines(lines)
    for number, line in reread:
        reread.taken.clear()
        where, cells = f"{name}:{number}", line.rstrip("\r\n").split("\t")
        numbers = [number]
        if cells == [""]:
            continue
        if len(cells) != len(columns):
            # The reader takes further lines if a quoted cell has line breaks.
            texts = itertools.chain([line], (after for _, after in reread))
            try:
                cells = next(csv.reader(texts, "excel-tab", strict=True))
            except csv.Error as error:
                detail = str(error).replace("\t", "\\t")
                if not columns:
                    raise UsageError(f"{where}: not TSV: {detail}", hint) from None
                on_bad(BadRow(where, "not TSV", f": {detail}", hint))
                reread.put_back()
                continue
            numbers += [number for number, _ in reread.taken]
        elif len(columns) == 1 and cells[0].startswith('"') and _unquoted(cells[0]) == cells[0]:
            # With one column, the number of cells does not tell whether the next line belongs here.
            on_bad(BadRow(where, "the row begins with a quote that does not close", hint=hint))
            continue
        else:
            cells = [_unquoted(cell) for cell in cells]
        if not columns:
            columns = cells
        elif len(cells) == len(columns):
            yield Row(where, dict(zip(columns, cells, strict=True)))
        else:
            problem = f"the row does not have {len(columns)} columns"
            for number in numbers:
                on_bad(BadRow(f"{name}:{number}", problem, hint=hint))


def is_number(text: str) -> bool:
    """Whether a string spells a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


class _RereadLines(Iterator[tuple[int, str]]):
    """Numbered lines, the last of which can be read again.

    Attributes:
        taken: the lines that were read since it was last cleared.
    """

    def __init__(self, lines: Iterator[tuple[int, str]]) -> None:
        self.taken: list[tuple[int, str]] = []
        self._lines = lines
        self._unread: deque[tuple[int, str]] = deque()

    def __next__(self) -> tuple[int, str]:
        line = self._unread.popleft() if self._unread else next(self._lines)
        self.taken.append(line)
        return line

    def put_back(self) -> None:
        """Read the taken lines again."""
        self._unread.extendleft(reversed(self.taken))
        self.taken.clear()


def _unquoted(cell: str) -> str:
    """Return the content of a cell that is quoted by the rules of CSV, or else the cell."""
    inside = cell[1:-1]
    if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inside.replace('""', ""):
        return inside.replace('""', '"')
    return cell


def _read_parquet(piece: Piece, file: IO[bytes]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    number = 0
    try:
        with tempfile.TemporaryFile() as unpacked, parquet_errors(piece.name):
            if piece.name.endswith(".gz"):
                # Parquet is read from the end, but a gzip stream only from the beginning.
                shutil.copyfileobj(file, unpacked, UNPACK_BYTES)
                file = cast(IO[bytes], unpacked)
            table = pq.ParquetFile(file)
            groups = range(table.num_row_groups)
            number = sum(table.metadata.row_group(n).num_rows for n in groups[: piece.begin])
            batches = table.iter_batches(
                batch_size=PARQUET_ROWS, row_groups=groups[piece.begin : piece.end]
            )
            classes = ClassNames.of_schema(table.schema_arrow, piece.name)
            for batch in batches:
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{piece.name}:{number}", classes.name(values))
    except UnicodeDecodeError:
        rows = f"one of the rows {number + 1} to {number + PARQUET_ROWS}"
        raise UsageError(f"{piece.name}: {rows} is not UTF-8") from None


def count_parquet_rows(piece: Piece) -> int:
    """Count the rows of a piece of a parquet file."""
    import pyarrow.parquet as pq

    with open_binary(as_file(piece.name)) as file, parquet_errors(piece.name):
        table = pq.ParquetFile(file)
        groups = range(table.num_row_groups)[piece.begin : piece.end]
        return sum(int(table.metadata.row_group(group).num_rows) for group in groups)


@contextmanager
def parquet_errors(name: object) -> Iterator[None]:
    """Turn an error of pyarrow into a UsageError that names the file."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{name} is not a whole parquet file: {one_line(error)}") from None


def unpack_beginning(data: bytes, name: str, max_bytes: int) -> tuple[bytes, int]:
    """Unpack the beginning of a gzip file, and return it with its number of packed bytes."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(data, max_bytes)
    except zlib.error as error:
        raise UsageError(f"{name} is not a whole gzip file: {error}") from None
    return unpacked, len(data) - len(unpacker.unused_data) - len(unpacker.unconsumed_tail)


def rows_in(data: bytes, name: str) -> Iterator[Row]:
    """Read the rows in the first bytes of a text file, and skip lines that are not rows."""
    return read_lines(Piece(name), io.BytesIO(data), lambda error: None)
