"""Read the rows of Parquet and Arrow files, in parts that fit into memory."""

import io
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, cast

from kdcli.data.rows import ClassNames, Piece, Row, check_distinct
from kdcli.data.storage import as_file, check_size, open_binary
from kdcli.errors import UsageError, one_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

TABLE_ROWS = 128  # Rows to decode at once.
COPIED_BYTES = 1 << 20  # Bytes to copy at once.
MAX_DECODED = 1 << 30  # Of the strings of a table, whose dictionaries hold each value once.
VALUE_BYTES = 16  # Of a value in memory, at least.
MAX_BATCH_BYTES = 1 << 28  # Of the values of a dictionary, which are repeated in each row.


def read_table(piece: Piece, file: IO[bytes], kind: str, *, packed: bool) -> Iterator[Row]:
    """Read the rows of a Parquet or Arrow file.

    Args:
        piece: A file, or row groups of a Parquet file.
        file: The content of the file.
        kind: `parquet` or `arrow`.
        packed: Whether the content is unpacked while it is read.

    Raises:
        UsageError: The file is damaged or too large, or two of its columns have the same name.
    """
    number = 0
    read = _parquet_batches if kind == "parquet" else _arrow_batches
    try:
        with tempfile.TemporaryFile() as unpacked, table_errors(piece.name, kind):
            if packed:
                # Tables are read from the end, but a packed stream only from the beginning.
                shutil.copyfileobj(file, unpacked, COPIED_BYTES)
                unpacked.seek(0)
                file = cast(IO[bytes], unpacked)
            size, decoded = file.seek(0, io.SEEK_END), 0
            file.seek(0)
            number, schema, batches = read(piece, file, size)
            check_distinct(piece.name, schema.names)
            classes = ClassNames.of_schema(schema, piece.name)
            for batch in batches:
                for values in batch.to_pylist():
                    number += 1
                    decoded += sum(len(text) for text in values.values() if isinstance(text, str))
                    check_size(piece.name, size, decoded, MAX_DECODED)
                    yield classes.name_row(Row(f"{piece.name}:{number}", values))
    except (UnicodeDecodeError, OverflowError) as error:
        rows = f"one of the rows {number + 1} to {number + TABLE_ROWS}"
        if isinstance(error, OverflowError):
            problem = "holds a date or time outside the years 1 to 9999"
            raise UsageError(
                f"{piece.name}: {rows} {problem}", "correct or drop its column"
            ) from None
        raise UsageError(f"{piece.name}: {rows} is not UTF-8") from None


_Batches = tuple[int, "pa.Schema", Iterator["pa.RecordBatch"]]
"""The number of rows before a piece, the schema, and the piece's rows in parts."""


def _parquet_batches(piece: Piece, file: IO[bytes], size: int) -> _Batches:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    groups = [table.metadata.row_group(n) for n in range(table.num_row_groups)]
    before = sum(group.num_rows for group in groups[: piece.begin])
    chosen = range(len(groups))[piece.begin : piece.end]
    _check_footer(file, chosen)
    columns = [groups[g].column(n) for g in chosen for n in range(groups[g].num_columns)]
    check_size(piece.name, size, VALUE_BYTES * sum(column.num_values for column in columns))
    check_size(piece.name, size, sum(column.total_uncompressed_size for column in columns))
    longest = max(map(_dictionary_bytes, columns), default=0)
    rows = min(TABLE_ROWS, 1 + MAX_BATCH_BYTES // (longest + 1))
    batches = table.iter_batches(batch_size=rows, row_groups=chosen)
    total = sum(groups[number].num_rows for number in chosen)
    return before, table.schema_arrow, _counted(piece.name, batches, total)


def _check_footer(file: IO[bytes], groups: Sequence[int]) -> None:
    """Check the metadata of columns. `RowGroupMetaData.column` aborts the process for damaged ones.

    The reader of row groups reports damaged metadata as an error, before it reads any values.

    Raises:
        OSError: The metadata are damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    footer = _Footer(file)
    # With a buffer, a column's values are not read when the column is opened.
    table = pq.ParquetFile(pa.PythonFile(footer, "r"), buffer_size=io.DEFAULT_BUFFER_SIZE)
    footer.ends = True
    for group in groups:
        with suppress(_EndOfFooter):
            next(table.iter_batches(row_groups=[group], use_threads=False), None)
    file.seek(0)


class _EndOfFooter(Exception):  # It is expected.
    """The values of a Parquet file would be read."""


class _Footer(io.RawIOBase):
    """A Parquet file that lets only its footer be read.

    Attributes:
        ends: Whether the footer was read. Reading more raises `_EndOfFooter`.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.ends = False
        self._file = file

    def readable(self) -> bool:
        """Return true, as pyarrow requires."""
        return True

    def seekable(self) -> bool:
        """Return true, as pyarrow requires."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read bytes of the footer."""
        if self.ends:
            raise _EndOfFooter
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position in the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position in the file."""
        return self._file.tell()


def _counted(
    name: str, batches: Iterable["pa.RecordBatch"], total: int
) -> Iterator["pa.RecordBatch"]:
    """Check that batches have as many rows as their file says. A damaged page may have fewer."""
    count = 0
    for batch in batches:
        count += len(batch)
        yield batch
    if count != total:
        raise UsageError(f"{name} is damaged: {count:,} of its {total:,} rows can be read")


def _dictionary_bytes(column: "pq.ColumnChunkMetaData") -> int:
    """Estimate the size of the dictionary of a column, and thereby of its longest value."""
    if not column.has_dictionary_page or not column.total_compressed_size:
        return 0
    packed = max(0, column.data_page_offset - (column.dictionary_page_offset or 0))
    return int(packed * column.total_uncompressed_size / column.total_compressed_size)


def _arrow_batches(piece: Piece, file: IO[bytes], size: int) -> _Batches:
    """Read the file format or the stream format, which `datasets` writes."""
    import pyarrow as pa

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        opened = pa.ipc.open_file(file)
        whole = map(opened.get_batch, range(opened.num_record_batches))
    else:
        opened = whole = pa.ipc.open_stream(file)
    return 0, opened.schema, _slices(piece.name, size, whole)


def _slices(
    name: str, size: int, batches: Iterable["pa.RecordBatch"]
) -> Iterator["pa.RecordBatch"]:
    """Cut the batches of an Arrow file into small ones."""
    for batch in batches:
        # Null values take no space, so there may be any number of them.
        check_size(name, size, VALUE_BYTES * batch.num_rows)
        for begin in range(0, len(batch), TABLE_ROWS):
            yield batch.slice(begin, TABLE_ROWS)


def table_share(piece: Piece, rows: int) -> float:
    """Return the share that some rows have of a piece of a Parquet file."""
    import pyarrow.parquet as pq

    with open_binary(as_file(piece.name)) as file, table_errors(piece.name, "parquet"):
        table = pq.ParquetFile(file)
        groups = range(table.num_row_groups)[piece.begin : piece.end]
        total = sum(int(table.metadata.row_group(group).num_rows) for group in groups)
    return rows / max(1, total)


@contextmanager
def table_errors(name: object, kind: str) -> Iterator[None]:
    """Turn an error of pyarrow into a UsageError that names the file."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{name} is not a whole {kind} file: {one_line(error)}") from None
