"""Numbers and text from outside as the views of a report write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Listing:
    """A table with a heading, a sentence below it, and the number of the row that stands out."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    marked: int | None = None


def number(value: float | None) -> str:
    """A loss or metric with four significant digits."""
    return "" if value is None else f"{value:.4g}"


def signed(value: float) -> str:
    """A difference of metrics, its sign always written."""
    return f"{value:+.4f}"


def names_of(values: Iterable[dict[str, float]]) -> list[str]:
    """The names in any of several sets of numbers, in the order of their first appearance."""
    return list(dict.fromkeys(name for of in values for name in of))


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
