"""Read comma-separated and tab-separated rows, also files that quote nothing.

A text may begin with a quote that never closes, which would join all rows up to the next quote.
Such a line is bad, and the lines after it are read by themselves. pyarrow and the readers of
`datasets` join the rows without a word.
"""

import csv
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from kdcli.data.rows import BadRow, OnBadRow, Row
from kdcli.errors import UsageError

MAX_USUAL_CELLS = 50  # A column with more different cells is no column of labels.
MANY_LINES = 8
HINTS = {
    "csv": "put the whole text in quotes and double the quotes in it, or save the rows as .jsonl",
    "tsv": "if a text has line breaks, save the rows as .csv or .jsonl",
}


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
        UsageError: The names of the columns are not CSV or TSV; or from `on_bad`.
    """
    reread = _RereadLines(lines)
    columns: list[str] = []
    usual: list[_UsualCells] = []
    for number, line in reread:
        reread.taken.clear()
        where = f"{name}:{number}"
        try:
            if kind == "csv":
                cells = _csv_cells(line, reread, usual)
            else:
                cells = _tsv_cells(line, reread, columns)
        except csv.Error as error:
            detail = ": " + str(error).replace("\t", "\\t")
            problem = f"not {kind.upper()}"
            if not columns:
                raise UsageError(f"{where}: {problem}{detail}", HINTS[kind]) from None
            on_bad(BadRow(where, problem, detail, HINTS[kind]))
            reread.put_back()
            continue
        if not columns:
            columns = cells
            usual = [_UsualCells() for _ in columns]
        elif len(cells) == len(columns):
            for cell, of_column in zip(cells, usual, strict=True):
                of_column.add(cell)
            yield Row(where, dict(zip(columns, cells, strict=True)))
        elif cells:
            problem = f"the row does not have {len(columns)} columns"
            for bad in [number, *(after for after, _ in reread.taken)]:
                on_bad(BadRow(f"{name}:{bad}", problem, hint=HINTS[kind]))


def _csv_cells(line: str, reread: "_RereadLines", usual: "Sequence[_UsualCells]") -> list[str]:
    """Return the cells of a row, whose quoted cells may hold line breaks.

    Raises:
        csv.Error: lines are joined that look like rows, or are not strictly CSV.
    """
    cells = next(csv.reader(itertools.chain([line], (after for _, after in reread))), [])
    joined = [line, *(after for _, after in reread.taken)]
    if len(joined) > 1 or line.count('"') % 2:
        next(csv.reader(joined, strict=True))
    if len(joined) > 1 and _look_like_rows(joined, usual):
        raise csv.Error("the quote that opens here joins lines that look like rows")
    return cells


def _tsv_cells(line: str, reread: "_RereadLines", columns: Sequence[str]) -> list[str]:
    """Return the cells of a row, which may be quoted.

    Many corpora, such as GLUE's files, quote nothing. pandas and spreadsheets quote cells with a
    quote, a tab or a line break. Only a tab or a line break changes the number of cells in a line.
    So a line with a cell for each column is a row, in which a cell is quoted if it also ends in a
    quote. Any other line is read as CSV.

    Raises:
        csv.Error: the line is not strictly CSV.
    """
    cells = line.rstrip("\r\n").split("\t")
    if cells == [""]:
        return []
    if len(cells) != len(columns):
        texts = itertools.chain([line], (after for _, after in reread))
        return next(csv.reader(texts, "excel-tab", strict=True))
    if len(columns) == 1 and cells[0].startswith('"') and _unquoted(cells[0]) == cells[0]:
        # With one column, the number of cells does not tell whether the next line belongs here.
        raise csv.Error("the row begins with a quote that does not close")
    return [_unquoted(cell) for cell in cells]


class _UsualCells:
    """What the cells of a column have in common: all are numbers, or there are few of them."""

    def __init__(self) -> None:
        self.values: set[str] = set()
        self.are_numbers = True

    def add(self, cell: str) -> None:
        """Add a cell."""
        if len(self.values) <= MAX_USUAL_CELLS:
            self.values.add(cell)
        self.are_numbers = self.are_numbers and _is_number(cell)

    def has(self, cell: str) -> bool:
        """Whether a cell is like the others; never if they have nothing in common."""
        if len(self.values) <= MAX_USUAL_CELLS:
            return cell in self.values
        return self.are_numbers and _is_number(cell)


def _look_like_rows(lines: Sequence[str], usual: Sequence[_UsualCells]) -> bool:
    """Whether lines that a quote joins look like rows of their own.

    Each has the right number of cells, and most cells of a column, for example of the labels, are
    like the usual ones. The last line of a text in quotes ends in such a cell too.
    """
    rows = [[cell.strip('"') for cell in line.rstrip("\r\n").split(",")] for line in lines]
    if len(usual) < 2 or any(len(row) != len(usual) for row in rows):
        return False
    if len(rows) >= MANY_LINES:
        # A text of so many lines hardly has the same number of commas in each.
        return True
    counts = [sum(map(usual[n].has, cells)) for n, cells in enumerate(zip(*rows[:-1], strict=True))]
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
