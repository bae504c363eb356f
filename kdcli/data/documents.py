"""Read documents from rows: the values of the text column."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kdcli.data.class_names import ClassName
from kdcli.data.rows import (
    BadRow,
    Piece,
    Row,
    RowValues,
    count_lines_before,
    count_parquet_rows,
    read_rows,
    rows_in,
    unpack_beginning,
)
from kdcli.data.storage import as_file, base_name, open_binary
from kdcli.errors import UsageError

COLUMN_HINT = (
    "name the column of the text with --set data.column=NAME (distill, cotrain, trim, benchmark), "
    "--set data.columns.text=NAME (evaluate, prune, export, compress) or --column NAME (tokenize)"
)
SAMPLE_BYTES = 1 << 18  # Size of a sample.
MAX_UNPACKED_BYTES = 1 << 22  # Of a sample from a gzip file.


class Sample(NamedTuple):
    """Documents from the beginning of a piece, and the number of bytes that they take."""

    texts: list[str]
    size: int


def texts_of(rows: Iterable[Row], column: str | None) -> Iterator[str]:
    """Yield the text of each row, except for rows with blank or null text.

    Args:
        rows: rows of one source.
        column: the column of the text; if None, `text_column` chooses it by the first row.

    Raises:
        UsageError: a row without the column, or with a value in it that is not text.
    """
    for where, values in rows:
        if column is None:
            column = text_column(where, values)
        if column not in values:
            problem = f"there is no column '{column}'; {columns_in(values)}"
            raise UsageError(f"{where}: {problem}", COLUMN_HINT)
        text = values[column]
        if not isinstance(text, str | None):
            problem = f"column '{column}' holds {type(text).__name__}, not text"
            raise UsageError(f"{where}: {problem}", COLUMN_HINT)
        if text and not text.isspace():
            yield check_encodable(where, column, text)


def text_column(where: str, values: RowValues) -> str:
    """Choose the column of the text: `text`, or the only column that holds a string."""
    strings = [
        column
        for column, value in values.items()
        if isinstance(value, str) and not isinstance(value, ClassName)
    ]
    if "text" in values:
        return "text"
    if len(strings) == 1:
        return strings[0]
    message = f"{where}: which column holds the text? {columns_in(values)}"
    raise UsageError(message, COLUMN_HINT)


def columns_in(values: RowValues) -> str:
    """List the columns of a row for a message."""
    if len(values) == 1:
        return f"the only column is {next(iter(values))}"
    return f"the columns are {', '.join(values)}" if values else "the row has no columns"


def check_encodable(where: str, column: str, text: str) -> str:
    """Return a text that a tokenizer can read.

    Raises:
        BadRow: the text holds half a surrogate pair, which JSON can spell but UTF-8 cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f" at character {error.start} of '{column}'"
        raise BadRow(where, "half a surrogate pair", detail) from None
    return text


def read_documents(piece: Piece, column: str | None) -> Iterator[str]:
    """Yield the documents of a piece that was cut from a file."""
    if column is None:
        # The first row of a piece may have other null columns than the first row of the file.
        first = next(read_rows(Piece(piece.name)), None)
        column = text_column(*first) if first else None
    try:
        yield from texts_of(read_rows(piece), column)
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
    """Take documents from the beginning of a piece of a file."""
    name = base_name(piece.name)
    if not name.endswith((".parquet", ".parquet.gz")):
        return _sample_lines(piece, column)
    texts, size = first_texts(texts_of(read_rows(piece), column))
    if name.endswith(".gz"):
        return Sample(texts, min(piece.size, size))
    return Sample(texts, piece.size * len(texts) // max(1, count_parquet_rows(piece)))


def _sample_lines(piece: Piece, column: str | None) -> Sample:
    """Take the whole lines among the first `SAMPLE_BYTES` of a piece."""
    with open_binary(as_file(piece.name)) as file:
        file.seek(piece.begin)
        data = file.read(SAMPLE_BYTES)
    size = len(data)
    if base_name(piece.name).endswith(".gz"):
        data, size = unpack_beginning(data, piece.name, MAX_UNPACKED_BYTES)
    # The first line of a piece may belong to the previous piece, and the last one may be cut.
    begin = data.find(b"\n") + 1 if piece.begin else 0
    whole = data[begin : data.rfind(b"\n") + 1] or data
    texts = list(texts_of(rows_in(whole, piece.name), column))
    return Sample(texts, size * len(whole) // max(1, len(data)))
