"""Read documents from rows: the values of the text column."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kdcli.data.accounts import EMPTY, RowAccount
from kdcli.data.class_names import ClassName
from kdcli.data.readers import (
    TABLES,
    FileFormat,
    count_lines_before,
    format_of,
    read_rows,
    rows_in,
)
from kdcli.data.rows import Piece, Row, check_encodable, columns_in, names_in, take_first
from kdcli.data.storage import as_file, base_name, open_binary
from kdcli.data.tables import table_share
from kdcli.errors import UsageError

COLUMN_HINT = (
    "name the column of the text with --set data.column=NAME (distill, cotrain, trim, benchmark), "
    "--set data.columns.text=NAME (evaluate, prune, export, compress) or --column NAME (tokenize)"
)
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


def text_column(rows: Sequence[Row]) -> str:
    """Choose the column of the text: `text`, or the only column that holds a string."""
    strings = [
        name for name in names_in(rows) if any(_is_text(row.values.get(name)) for row in rows)
    ]
    if any("text" in row.values for row in rows):
        return "text"
    if len(strings) == 1:
        return strings[0]
    where = rows[0].where
    message = f"{where}: which column holds the text? {columns_in(names_in(rows))}"
    raise UsageError(message, COLUMN_HINT)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not isinstance(value, ClassName)


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
        read = int(piece.size * table_share(piece, len(texts)))
    elif form is not None and (form.name in TABLES or form.name == "json"):
        # The file is read or unpacked as a whole.
        read = size
    return Sample(texts, min(piece.size, read))
