"""Rows of files and data sets, bad rows, and the pieces in which sources are read."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from kdcli.errors import UsageError

FIRST_ROWS = 100  # Rows that are kept in memory to tell columns apart. One row may lack a column.

RowValues = Mapping[str, Any]
"""The values of a row by column, as JSON or Parquet holds them."""


class Row(NamedTuple):
    """A row of a file: its place `where` (`file:line`), and its values by column."""

    where: str
    values: RowValues


class BadRow(UsageError):
    """A row that cannot be used.

    Attributes:
        where: The file and line.
        problem: What is wrong; rows with the same problem are counted together.
        detail: Details of this row, appended to the problem.
    """

    def __init__(self, where: str, problem: str, detail: str = "", hint: str | None = None) -> None:
        super().__init__(f"{where}: {problem}{detail}", hint)
        self.where, self.problem = where, problem


class Remark(BadRow):
    """Something to count that is by itself no error."""


class BlankLine(Remark):
    """A line with nothing but white space. It is no row."""

    def __init__(self, where: str) -> None:
        super().__init__(where, "the line is empty")


class OutsideShare(Remark):
    """A row outside the share of the rows that is read."""

    def __init__(self, where: str) -> None:
        super().__init__(where, "the row is outside the share")


class LineBreaks(Remark):
    """A row of several lines, whose quoted cells hold `count` line breaks."""

    def __init__(self, where: str, count: int) -> None:
        super().__init__(where, "a quoted cell holds a line break")
        self.count = count


OnBadRow = Callable[[BadRow], None]  # Raises the error, or records it and skips the row.


def raise_bad_row(error: BadRow) -> None:
    """Raise the error of the first bad row. Empty lines are skipped."""
    if not isinstance(error, Remark):
        raise error


class Piece(NamedTuple):
    """A part of a source that is read on its own.

    Attributes:
        name: A file or URL; of a hub data set, its name and split.
        begin, end: The bytes in which the lines of the piece begin, the row groups of a parquet
            file, or the shards of a hub data set. `end` None is the end of the file.
        size: The approximate size in bytes; 0 if unknown.
        version: A value that changes with the content.
        share: The share of the rows that is read; see `share_of`.
    """

    name: str
    begin: int = 0
    end: int | None = None
    size: int = 0
    version: str = ""
    share: float = 1.0


def hash_of(text: str) -> int:
    """Return the 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def texts_in(values: RowValues) -> list[str]:
    """Return all texts of a row, and all words of its lists."""
    lists = (each if isinstance(each, list) else [each] for each in values.values())
    return [text for each in lists for text in each if isinstance(text, str)]


def share_of(rows: Iterator[Row], share: float, on_bad: OnBadRow) -> Iterator[Row]:
    """Yield the rows whose texts have the smallest hashes, and call `on_bad` with all others.

    A row is in the same shares in every file and in every order. A larger share has all rows of a
    smaller one.
    """
    for row in rows:
        if share == 1 or hash_of("\n".join(texts_in(row.values))) < share * 2**64:
            yield row
        else:
            on_bad(OutsideShare(row.where))


def take_first(rows: Iterable[Row]) -> tuple[list[Row], Iterator[Row]]:
    """Return the first rows, and all rows."""
    rest = iter(rows)
    first = list(itertools.islice(rest, FIRST_ROWS))
    return first, itertools.chain(first, rest)


def names_in(rows: Iterable[Row]) -> list[str]:
    """List the columns of some rows, in the order in which they occur."""
    return list(dict.fromkeys(name for _, values in rows for name in values))


def columns_in(values: Iterable[str]) -> str:
    """List the columns of a row for a message."""
    names = list(values)
    if len(names) == 1:
        return f"the only column is {names[0]}"
    return f"the columns are {', '.join(names)}" if names else "the row has no columns"


def check_encodable(where: str, column: str, text: str) -> str:
    """Return a text that a tokenizer can read.

    Raises:
        BadRow: The text holds half a surrogate pair, which JSON can spell but UTF-8 cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f" at character {error.start} of '{column}'"
        raise BadRow(where, "half a surrogate pair", detail) from None
    return text
