"""Numbers and text from outside as the views of a report write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kdcli.report.schema import Card


@dataclass(frozen=True)
class Listing:
    """A table with a heading, a sentence below it, and the number of the row that stands out."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    marked: int | None = None


def filled(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns in which no row says anything."""
    keep = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in keep], [[row[i] for i in keep] for row in rows]


def number(value: float | None) -> str:
    """A loss or metric with four significant digits."""
    return "" if value is None else f"{value:.4g}"


def signed(value: float) -> str:
    """A difference of metrics, its sign always written."""
    return f"{value:+.4f}"


def names_of(values: Iterable[dict[str, float]]) -> list[str]:
    """The names in any of several sets of numbers, in the order of their first appearance."""
    return list(dict.fromkeys(name for of in values for name in of))


def percent(share: float | None, digits: int = 2) -> str:
    """A share in percent; what is little but not nothing does not become 0."""
    if share is None:
        return ""
    least = 10**-digits
    return f"<{least:g}" if 0 < 100 * share < least / 2 else f"{100 * share:.{digits}f}"


def cut(text: str, length: int) -> str:
    """A text on one line, of at most `length` characters; what is missing shows as an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def plain(text: str) -> str:
    """Text from outside that stays text in Markdown, loads no picture there, and stays in one cell of a table."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", " ".join(text.split()).replace("<", "&lt;"))


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table."""
    line, *lines = ["| " + " | ".join(map(plain, row)) + " |" for row in (header, *rows)]
    return [line, "|" + "---|" * len(header), *lines]


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count(value: int) -> str:
    """A number of things in thousands, millions or billions."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def on_disk(card: Card) -> str:
    """How large a model is: `90.9 MB`, and of another type than float32 `2.0 MB, fp16`, for half the bytes are no fewer
    weights."""
    return bytes_of(card.bytes) + (f", {card.held_in}" if card.held_in != "fp32" else "")


def bytes_of(value: int) -> str:
    """A number of bytes in GB or MB, so that sizes can be compared; kB of what would be 0.0 MB (a small mask)."""
    if value >= 10**9:
        return f"{value / 10**9:,.2f} GB"
    return f"{value / 10**6:,.1f} MB" if value >= 10**5 else f"{value / 1000:.1f} kB"
