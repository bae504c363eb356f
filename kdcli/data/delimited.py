"""Read comma-separated and tab-separated rows, also files that quote nothing.

A text may begin with a quote that never closes, which would join all rows up to the next quote.
Such a line is bad, and the lines after it are read by themselves. pyarrow and the readers of
`datasets` join the rows without a word.
"""

import csv
import functools
import itertools
import re
import shlex
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from kdcli.data.rows import BadRow, BlankLine, LineBreaks, OnBadRow, Row, check_distinct
from kdcli.errors import UsageError

MAX_USUAL_CELLS = 50  # A column with more different cells is no column of labels.
MAX_COLUMNS = 10_000
MANY_LINES = 8
WHOLE_SHARE = 0.8
FIRST_LINES = 100
SEPARATORS = {"csv": ",", "tsv": "\t"}
KNOWN_SEPARATORS = ",;\t|"
SEPARATOR_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # Of spreadsheets.
ESCAPED_QUOTE = r"\""  # As Spark writes it. CSV doubles the quote.
UNCLEAR_QUOTE = "the quote that opens here joins lines that look like rows"
OPEN_QUOTE = "a quote in this row does not close"
CUT = "unexpected end of data"
"""What the csv module says of a quote that does not close."""
HINTS = {
    "csv": 'put the whole text in quotes and double the quotes in it ("", not \\"), or save the '
    "rows as .jsonl; "
    "if another character separates the columns, put a line such as 'sep=;' above the others",
    "tsv": "if a text has line breaks, save the rows as .csv or .jsonl",
}


UNNAMED_HINT = (
    "put texts with a separator in quotes, name all columns in line 1, or remove the column"
)


class _Header(NamedTuple):
    """How a file is read.

    Attributes:
        columns: The names of the columns.
        separator: The character or spaces between two cells.
        spaces: Whether a space follows each separator.
        quotes: Whether the first lines quote cells, by all rules of CSV.
        bare_quotes: Whether a cell of an earlier row has a quote, but is not in quotes itself. A
            program that writes CSV would have quoted it.
        needs_quotes: Whether a line shows that the file quotes cells: the names of the columns are
            quoted, or a row would be wrong without its quotes. Two stray quotes do not show it.
    """

    columns: list[str]
    separator: str
    spaces: bool = False
    quotes: bool = False
    bare_quotes: bool = False
    needs_quotes: bool = False


def read_delimited(
    kind: str, name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow
) -> Iterator[Row]:
    """Read rows whose first line names the columns.

    Args:
        kind: `csv` or `tsv`.
        name: The file.
        lines: The numbered lines.
        on_bad: Called with every line that is not a row.

    Raises:
        UsageError: The line with the names of the columns cannot be read, or lines are not
            accounted for; or from `on_bad`.
    """
    reread = _RereadLines(lines)
    header = _read_header(kind, name, reread)
    columns = header.columns
    named = max((number for number, column in enumerate(columns, 1) if column), default=0)
    first = reread.look_ahead(FIRST_LINES)
    usual = _usual_cells(first, header)
    header = header._replace(
        quotes=_are_quoted(first, header, usual),
        needs_quotes=header.needs_quotes or any(_needs_quotes(line, header) for line in first),
    )
    for number, line in reread:
        reread.taken.clear()
        where = f"{name}:{number}"
        try:
            cells = _cells(line, reread, header, usual)
        except csv.Error as error:
            problem = OPEN_QUOTE if str(error) == CUT else str(error)
            detail = ": " + problem.replace("\t", "\\t")
            on_bad(BadRow(where, f"not {kind.upper()}", detail, HINTS[kind]))
            reread.put_back()
            continue
        if reread.taken and reread.taken[-1][0] != number + len(reread.taken):
            # A line of the row was reported as bad, and is missing.
            continue
        if reread.taken:
            # Lines that did not look like rows were joined.
            header = header._replace(needs_quotes=True)
        elif _has_bare_quote(line, cells):
            header = header._replace(bare_quotes=True)
        if len(columns) > 1 and sorted(names := _names(cells)) == sorted(columns):
            if names != columns:
                raise UsageError(
                    f"{where}: from here on, the columns have another order: {', '.join(names)}",
                    "if files were joined here, give the files in a directory",
                )
            problem = "the row repeats the names of the columns"
            on_bad(BadRow(where, problem, hint="if files were joined here, remove the line"))
        elif len(cells) == len(columns) and any(map(str.strip, cells[named:])):
            # A spreadsheet may end every line in empty cells, which hide a separator in a text.
            detail = f": {next(filter(str.strip, cells[named:]))!r:.60}"
            on_bad(BadRow(where, "a cell is in a column without a name", detail, UNNAMED_HINT))
        elif len(cells) == len(columns):
            for cell, of_column in zip(cells, usual, strict=True):
                of_column.add(cell)
            if reread.taken:
                _check_line_breaks(where, cells, len(reread.taken))
                on_bad(LineBreaks(where, len(reread.taken)))
            yield Row(where, dict(zip(columns, cells, strict=True)))
        elif not cells:
            on_bad(BlankLine(where))
        else:
            problem = f"the row does not have {len(columns)} columns"
            for bad in [number, *(after for after, _ in reread.taken)]:
                on_bad(BadRow(f"{name}:{bad}", problem, hint=HINTS[kind]))


def _check_line_breaks(where: str, cells: Sequence[str], joined: int) -> None:
    """Check that the line breaks in the cells of a row explain all lines that it joins.

    Raises:
        UsageError: A line is lost.
    """
    breaks = sum(cell.count("\n") for cell in cells)
    if breaks != joined:
        raise UsageError(
            f"{where}: the row joins {joined + 1:,} lines, but its cells hold only {breaks:,} line "
            "breaks",
            "save the rows as .jsonl, and please report this line",
        )


def _read_header(kind: str, name: str, reread: "_RereadLines") -> _Header:
    """Read the names of the columns, and find out what separates them.

    The separator is the usual one, unless a line `sep=;` names it, or the names are separated by
    another one alone.

    Returns:
        The header, without columns if there are no lines.

    Raises:
        UsageError: The line is not CSV or TSV, its separator is unclear, or two names are the same.
    """
    separator, declared = SEPARATORS[kind], False
    for number, line in reread:
        reread.taken.clear()
        where = f"{name}:{number}"
        if not declared and (match := SEPARATOR_LINE.fullmatch(line)):
            separator, declared = match[1], True
            continue
        found = [s for s in KNOWN_SEPARATORS if len(next(csv.reader([line], delimiter=s), [])) > 1]
        if found and separator not in found and not declared:
            if len(found) > 1:
                raise UsageError(
                    f"{where}: are the columns separated by {' or '.join(map(repr, found))}?",
                    f"write the right one in a line above the others, such as sep={found[0]}",
                )
            separator = found[0]
        try:
            cells = _cells(line, reread, _Header([], separator), ())
        except csv.Error as error:
            detail = str(error).replace("\t", "\\t")
            raise UsageError(f"{where}: not {kind.upper()}: {detail}", HINTS[kind]) from None
        if not cells:
            continue
        spaces = len(cells) > 1 and all(cell.startswith(" ") for cell in cells[1:])
        if spaces:
            cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
        if len(cells) == 1 and any(mark in cells[0] for mark in KNOWN_SEPARATORS):
            script = r"""'s/^"//; s/"\r*$//; s/""/"/g'"""
            raise UsageError(
                f"{where}: the only column has the name {cells[0]!r}",
                "if quotes around whole lines join several columns, remove them: "
                f"sed -i {script} {shlex.quote(name)}; otherwise rename the column",
            )
        _check_names(where, names := _names(cells))
        return _Header(names, separator, spaces, needs_quotes='"' in line)
    return _Header([], separator)


def _names(cells: Sequence[str]) -> list[str]:
    """Return the names of columns without a byte order mark or white space around them."""
    return [cell.strip("\ufeff \t\r\n") for cell in cells]


def _check_names(where: str, names: Sequence[str]) -> None:
    """Raise a UsageError if there are too many names, if two columns have the same one, or if they
    are in single quotes."""
    if len(names) > MAX_COLUMNS:
        raise UsageError(f"{where}: there are {len(names):,} columns, more than {MAX_COLUMNS:,}")
    check_distinct(where, filter(None, names))
    if names and all(len(name) > 2 and name[0] == name[-1] == "'" for name in names):
        raise UsageError(
            f"{where}: the columns are in single quotes ({', '.join(names)}), which CSV does not "
            "have: they would be a part of every cell",
            'write double quotes, in pandas with read_csv(FILE, quotechar="\'").to_csv(FILE)',
        )


def _cells(
    line: str, reread: "_RereadLines", header: _Header, usual: "Sequence[_UsualCells]"
) -> list[str]:
    """Return the cells of a row, whose quoted cells may hold line breaks.

    Raises:
        csv.Error: Lines are joined that look like rows, or are not strictly CSV.
    """
    if header.separator == "\t":
        return _tab_separated_cells(line, reread, header, usual)
    reader = functools.partial(
        csv.reader, delimiter=header.separator, skipinitialspace=header.spaces
    )
    cells = next(reader(itertools.chain([line], (after for _, after in reread))), [])
    joined = [line, *(after for _, after in reread.taken)]
    try:
        if '"' in line:
            next(reader(joined, strict=True))
    except csv.Error:
        # The quotes of a single line may be a part of the text, in a file that quotes nothing.
        cells = line.rstrip("\r\n").split(header.separator)
        is_plain = len(joined) == 1 and line.count('"') % 2 == 0 and ESCAPED_QUOTE not in line
        if not is_plain or len(cells) != len(header.columns):
            raise
        return [_unquoted(cell) for cell in cells]
    if len(joined) > 1 and (header.bare_quotes or _look_like_rows(joined, header, usual)):
        raise csv.Error(UNCLEAR_QUOTE)
    return cells


def _needs_quotes(line: str, header: _Header) -> bool:
    """Whether a line is a row only because of its quotes: they hold a separator or a quote."""
    if '"' not in line:
        return False
    rows = csv.reader(
        [line], delimiter=header.separator, skipinitialspace=header.spaces, strict=True
    )
    try:
        count = len(next(rows))
    except csv.Error:
        return False
    plain = line.rstrip("\r\n").split(header.separator)
    return count == len(header.columns) and (
        len(plain) != count or any('"' in cell[1:-1] for cell in plain if _unquoted(cell) != cell)
    )


def _has_bare_quote(line: str, cells: Sequence[str]) -> bool:
    """Whether a cell of a line has a quote, but is not in quotes and does not double it."""
    count = line.count('"')
    return 0 < count < sum(2 * cell.count('"') + 2 for cell in cells if '"' in cell)


def _tab_separated_cells(
    line: str, reread: "_RereadLines", header: _Header, usual: "Sequence[_UsualCells]"
) -> list[str]:
    """Return the cells of a row that is separated by tabs. They may be quoted.

    Many corpora, such as GLUE's files, quote nothing. pandas and spreadsheets quote cells with a
    quote, a tab or a line break. Only a tab or a line break changes the number of cells in a line.
    So a line with a cell for each column is a row, in which a cell is quoted if it also ends in a
    quote. Any other line is read as CSV. So are lines that a quote joins, if the first lines of the
    file quote cells as CSV does, and if the joined lines do not look like rows.

    Raises:
        csv.Error: The line is not strictly CSV, or a quote joins a few lines that look like rows in
            a file that quotes cells.
    """
    cells = line.rstrip("\r\n").split("\t")
    if cells == [""]:
        return []
    texts = itertools.chain([line], (after for _, after in reread))
    quoted = csv.reader(texts, "excel-tab", strict=True)
    if len(cells) != len(header.columns):
        return next(quoted)
    is_open = any(map(_is_open, cells))
    if is_open and len(cells) == 1:
        # With one column, the number of cells does not tell whether the next line belongs here.
        raise csv.Error(OPEN_QUOTE)
    if is_open and header.quotes:
        whole: list[str] = []
        with suppress(csv.Error):
            whole = next(quoted)
        joined = [line, *(after for _, after in reread.taken)]
        if len(whole) == len(cells):
            if not _look_like_rows(joined, header, usual):
                return whole
            if len(joined) < MANY_LINES:
                raise csv.Error(UNCLEAR_QUOTE)
        reread.put_back()
    return [_unquoted(cell) for cell in cells]


class _UsualCells:
    """The usual form of a column's cells: all are numbers, or there are few different values."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.are_numbers = True
        self.count = 0

    def add(self, cell: str) -> None:
        """Add a cell."""
        self.count += 1
        if len(self.values) <= MAX_USUAL_CELLS:
            self.values.add(cell)
        self.are_numbers = self.are_numbers and _is_number(cell)

    @property
    def have_form(self) -> bool:
        """Whether the cells have something in common."""
        few = len(self.values) <= min(MAX_USUAL_CELLS, self.count // 4)
        return self.count > 0 and (self.are_numbers or few)

    def has(self, cell: str) -> bool:
        """Whether a cell is like the others; never if they have nothing in common."""
        if self.count and self.are_numbers and _is_number(cell):
            return True
        return len(self.values) <= MAX_USUAL_CELLS and cell in self.values


def _are_quoted(lines: Sequence[str], header: _Header, usual: "Sequence[_UsualCells]") -> bool:
    """Whether some of the first lines have quoted cells, and all are strictly CSV."""
    if not any('"' in line for line in lines):
        return False
    rows = csv.reader(lines, delimiter=header.separator, strict=True)
    end = 0
    try:
        for cells in rows:
            if len(cells) not in (0, len(header.columns)):
                return False
            end = rows.line_num
    except csv.Error as error:
        # The first lines may end within a quoted cell, or a quote may never close.
        whole, cut = lines[:end], lines[end:]
        is_cut = str(error) == CUT and any('"' in line for line in whole)
        return is_cut and (len(cut) == 1 or not _look_like_rows(cut, header, usual))
    return True


def _usual_cells(lines: Sequence[str], header: _Header) -> list[_UsualCells]:
    """Return the cells of the first lines, except for lines with a quote."""
    usual = [_UsualCells() for _ in header.columns]
    for line in lines:
        cells = line.rstrip("\r\n").split(header.separator)
        if '"' not in line and len(cells) == len(usual):
            for cell, of_column in zip(cells, usual, strict=True):
                of_column.add(cell.lstrip() if header.spaces else cell)
    return usual


def _look_like_rows(lines: Sequence[str], header: _Header, usual: Sequence[_UsualCells]) -> bool:
    """Whether lines that a quote joins look like rows of their own.

    Nearly all have the right number of cells, and most cells of a column, for example of the
    labels, are like the usual ones. Cells before the quote and after the end of the text do not
    count, because they belong to the row in any case. If the cells of no column have anything in
    common, the number of cells decides, unless something else shows that the file quotes cells.
    """
    around = ' "' if header.spaces else '"'
    split = [line.rstrip("\r\n").split(header.separator) for line in lines]
    rows = [[cell.strip(around) for cell in cells] for cells in split]
    whole = [cells for cells in rows if len(cells) == len(usual)]
    opens = (n for n, cell in enumerate(split[0]) if _is_open(cell.lstrip()))
    quoted = next(opens, 0)
    others = (of_column for n, of_column in enumerate(usual) if n != quoted)
    if not header.needs_quotes and not any(each.have_form for each in others):
        return len(whole) == len(rows)
    if len(usual) < 2 or len(whole) < WHOLE_SHARE * len(rows):
        return False
    if len(whole) == len(rows) >= MANY_LINES:
        # A text of so many lines hardly has the same number of commas in each.
        return True
    counts = [
        sum(
            of_column.has(cells[n])
            for cells in rows[n <= quoted : len(rows) - (n >= quoted)]
            if len(cells) == len(usual)
        )
        for n, of_column in enumerate(usual)
    ]
    return 2 * max(counts) >= len(rows) - 1


def _is_number(text: str) -> bool:
    """Whether a string spells a number."""
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()


class _RereadLines(Iterator[tuple[int, str]]):
    """Numbered lines, the last of which can be read again.

    Attributes:
        taken: The lines that were read since it was last cleared.
    """

    def __init__(self, lines: Iterator[tuple[int, str]]) -> None:
        self.taken: list[tuple[int, str]] = []
        self._lines = lines
        self._unread: deque[tuple[int, str]] = deque()

    def __next__(self) -> tuple[int, str]:
        line = self._unread.popleft() if self._unread else next(self._lines)
        self.taken.append(line)
        return line

    def look_ahead(self, count: int) -> list[str]:
        """Return the next lines, which are read again."""
        self.taken.clear()
        lines = [line for _, line in itertools.islice(self, count)]
        self.put_back()
        return lines

    def put_back(self) -> None:
        """Read the taken lines again."""
        self._unread.extendleft(reversed(self.taken))
        self.taken.clear()


def _is_open(cell: str) -> bool:
    """Whether a cell begins with a quote that does not close at its end."""
    return cell.startswith('"') and _unquoted(cell) == cell


def _unquoted(cell: str) -> str:
    """Return the content of a cell that is quoted by the rules of CSV, or else the cell."""
    inside = cell[1:-1]
    if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inside.replace('""', ""):
        return inside.replace('""', '"')
    return cell
