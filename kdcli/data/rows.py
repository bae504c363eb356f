"""Rows of files and data sets, bad rows, and the pieces in which sources are read."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from kdcli.errors import UsageError, first_line

if TYPE_CHECKING:
    import pyarrow as pa

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


class NamesOfColumns(Remark):
    """A line of CoNLL that is read as the names of the columns, but may be a word."""

    def __init__(self, where: str, line: str) -> None:
        super().__init__(
            where,
            f"{line!r} is read as the names of the columns; if it is a word with its tag, write "
            "another sentence above it",
        )


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
    """Return the 64-bit hash of a text, which may hold half a surrogate pair."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def texts_in(values: RowValues) -> list[str]:
    """Return all texts of a row, and all words of its lists."""
    lists = (each if isinstance(each, list) else [each] for each in values.values())
    return [text for each in lists for text in each if isinstance(text, str)]


def share_of(rows: Iterator[Row], share: float, on_bad: OnBadRow) -> Iterator[Row]:
    """Yield the rows whose texts have the smallest hashes, and call `on_bad` with all others.

    A row is in the same shares in every order of the rows and in every file of the same format. A
    larger share has all rows of a smaller one.
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


TEXT_COLUMNS = (("text",), ("sentence",), ("review", "content", "comment", "body"))
"""Usual names of the column of a text, as `column_key` writes them. The first group that names a
column decides."""

MUCH_LONGER = 3
"""Ratio of median lengths above which another column may hold the text."""


def column_key(name: str) -> str:
    """Normalise a name, so that `Sentence_1`, `sentence 1` and `sentence1` are the same."""
    return re.sub(r"[\W_]", "", name.lower())


def usual_text_column(rows: Sequence[Row]) -> str | None:
    """Return the column of the text by its name, or the only column that holds strings.

    Returns:
        None if no column or several columns may be meant, or if another column has much longer
        strings than the one with a usual name other than `text`.
    """
    names = names_in(rows)
    if "text" in names:
        return "text"
    strings = [name for name in names if strings_in(rows, name)]
    named = ([n for n in strings if column_key(n) in group] for group in TEXT_COLUMNS)
    found = next(filter(None, named), strings)
    if len(found) != 1:
        return None
    longest = max(median_length(rows, name) for name in strings)
    return None if longest > MUCH_LONGER * median_length(rows, found[0]) else found[0]


def strings_in(rows: Iterable[Row], column: str) -> list[str]:
    """Return the strings in a column, except for the names of classes."""
    values = (values.get(column) for _, values in rows)
    return [v for v in values if isinstance(v, str) and not isinstance(v, ClassName)]


def median_length(rows: Iterable[Row], column: str) -> float:
    """Return the median length of a column's strings."""
    texts = strings_in(rows, column)
    return median(map(len, texts)) if texts else 0.0


def columns_in(values: Iterable[str]) -> str:
    """List the columns of a row for a message."""
    names = _shown_names(values)
    if len(names) == 1:
        return f"the only column is {names[0]}"
    return f"the columns are {', '.join(names)}" if names else "the row has no columns"


def unused_columns(names: Iterable[str], used: Collection[str]) -> str:
    """List the columns that are not used, at the end of a message."""
    columns = list(names)
    shown = zip(columns, _shown_names(columns), strict=True)
    unused = [of_message for name, of_message in shown if name not in used]
    return f"; unused columns: {', '.join(unused)}" if unused else ""


def check_distinct(place: str, names: Iterable[str]) -> None:
    """Raise a UsageError if two columns have the same name: one would be lost."""
    (repeated, times), *_ = Counter(names).most_common(1) or [("", 0)]
    if times > 1:
        raise UsageError(
            f"{place}: there are {times} columns '{repeated}'; each column needs its own name",
            "rename the columns",
        )


def _shown_names(names: Iterable[str]) -> list[str]:
    """Return the names of columns, and the place of a column without a name.

    A name with spaces around it is quoted, so that they can be seen.
    """
    return [
        (name if name == name.strip() else repr(name))
        if name.strip()
        else f"column {n} (without a name)"
        for n, name in enumerate(names, 1)
    ]


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


HUGGING_FACE = b"huggingface"
CARD, INFOS = "README.md", "dataset_infos.json"  # The second is of older data sets.
CLASS_LABEL, CLASS_LABEL_TYPE, MAX_CARD_BYTES = b"class_label", b"ClassLabel", 1 << 20
NUMBER = re.compile(r"-?\d+")


class ClassName(str):
    """The name of a class, with its number in the schema of its source."""

    number: int

    def __new__(cls, name: str, number: int) -> "ClassName":
        """Create the name with its number."""
        named = super().__new__(cls, name)
        named.number = number
        return named


@dataclass(frozen=True)
class ClassNames:
    """The columns of a table whose classes have names, each with its feature of `datasets`."""

    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, features: Mapping[str, Any] | None) -> "ClassNames":
        """Take the features of a data set, if they are known."""
        named = {name: each for name, each in (features or {}).items() if _has_names(each)}
        return cls(named)

    @classmethod
    def of_schema(cls, schema: "pa.Schema", file: object) -> "ClassNames":
        """Read the names from the schema of an Arrow table.

        Raises:
            UsageError: `datasets` cannot read the description in the schema.
        """
        if HUGGING_FACE not in (schema.metadata or {}):
            return cls()
        import datasets

        with _feature_errors(f"the schema of {file}"):
            return cls.of(datasets.Features.from_arrow_schema(schema))

    @classmethod
    def of_card(cls, folder: Path) -> "ClassNames":
        """Read the names from the card of a data set, which may describe one configuration.

        Raises:
            UsageError: `datasets` cannot read the description in the card.
        """
        cards = [folder / name for name in (CARD, INFOS) if (folder / name).is_file()]
        marks = (CLASS_LABEL, CLASS_LABEL_TYPE)
        contents = [card.read_bytes()[:MAX_CARD_BYTES] for card in cards]
        if not any(mark in content for content in contents for mark in marks):
            return cls()
        from datasets.info import DatasetInfosDict

        with _feature_errors(" or ".join(map(str, cards))):
            infos = list(DatasetInfosDict.from_directory(str(folder)).values())
        return cls.of(infos[0].features if len(infos) == 1 else None)

    def name_row(self, row: Row) -> Row:
        """Replace the numbers of classes in a row by their names."""
        if not self.columns:
            return row
        values = {
            name: _named(self.columns[name], value) if name in self.columns else value
            for name, value in row.values.items()
        }
        return Row(row.where, values)


@contextmanager
def _feature_errors(place: str) -> Iterator[None]:
    """Turn errors of `datasets` about features into a UsageError that names their place."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # Readers of YAML raise their own classes.
        raise UsageError(
            f"the features in {place} cannot be read: {first_line(error)}",
            "write the data again with datasets, or remove the description of its features",
        ) from None


def _has_names(feature: Any) -> bool:
    """Whether a feature holds a class with a name that is not its number."""
    if isinstance(feature, Mapping):
        return any(map(_has_names, feature.values()))
    if names := getattr(feature, "names", None):
        return bool(names != [str(number) for number in range(len(names))])
    return _has_names(feature.feature) if hasattr(feature, "feature") else False


def _named(feature: Any, value: Any) -> Any:
    """Name the classes in a value. A negative number stands for no label."""
    if isinstance(value, dict) and isinstance(feature, Mapping):
        return {
            key: _named(feature[key], each) if key in feature else each
            for key, each in value.items()
        }
    if isinstance(value, list) and hasattr(feature, "feature"):
        return [_named(feature.feature, each) for each in value]
    names = getattr(feature, "names", None)
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()) and names and value not in names:
        # A cell of CSV.
        value = int(value)
    if not names or not isinstance(value, int) or value >= len(names):
        return value
    return None if value < 0 else ClassName(names[value], value)
