"""Tables of text, and all that a benchmark says, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from kdcli.report.schema import Report
from kdcli.report.sections.latency import (
    agreement_table,
    cell_tables,
    not_measured,
    projection_table,
    published_speedups,
    remarks,
)
from kdcli.report.text import Listing

WIDE = 80
"""Characters of a terminal: a wider table is turned on its side if it has few rows, and folds its headings if not."""

LONG = 14
"""Characters of a heading up to which a column of numbers is not folded on a terminal."""

LONG_CELL = 24
"""Characters of its cells up to which it is not."""


def latency_parts(report: Report) -> Iterable[Table | str]:
    """What a benchmark measured, what it did not and why, and what it only calculated."""
    for listing in cell_tables(report, narrow=True):
        yield from section(listing)
    yield from map(escape, remarks(report))
    if missing := not_measured(report):
        yield "[bold]Not measured[/bold]"
        yield from map(escape, missing)
    for found in (
        agreement_table(report, narrow=True),
        published_speedups(report, narrow=True),
        projection_table(report),
    ):
        if found is not None:
            yield from section(found)


def section(listing: Listing) -> Iterable[Table | str]:
    """Heading, table and note."""
    yield f"[bold]{escape(listing.title)}[/bold]"
    yield rich_table(listing)
    if listing.note:
        yield escape(listing.note)


def rich_table(listing: Listing) -> Table:
    """A listing as a table; what would be far too wide is turned on its side."""
    made = Table(header_style="bold")
    columns = list(zip(listing.header, *listing.rows, strict=True))
    tight = sum(max(map(len, column)) + 3 for column in columns) >= WIDE
    if len(listing.rows) < len(listing.header) and sum(len(h) + 3 for h in listing.header) >= WIDE:
        # Few rows of many facts read better on their side.
        made.add_column("")
        for row in listing.rows:
            made.add_column(escape(row[0]), justify="right", overflow="fold")
        for i, fact in enumerate(listing.header[1:], 1):
            made.add_row(escape(fact), *(escape(row[i]) for row in listing.rows))
        return made
    for i, column in enumerate(columns):
        # Where it is too narrow, names and long headings fold and numbers do not.
        narrow = len(column[0]) <= (max(map(len, column[1:]), default=0) if tight else LONG)
        whole = narrow and all(cell[:1] in "+-0123456789" and len(cell) <= LONG_CELL for cell in column[1:])
        made.add_column(escape(column[0]), justify="right" if i else "left", overflow="fold", no_wrap=whole)
    for i, row in enumerate(listing.rows):
        made.add_row(*map(escape, row), style="bold" if i == listing.marked else None)
    return made
