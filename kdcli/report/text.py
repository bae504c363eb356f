"""Sections of a report as data, and how numbers and names are written in them."""

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kdcli.types import Card


class View(enum.IntEnum):
    """The views of a report; each shows all that the ones before it show."""

    TERMINAL = 0
    MARKDOWN = 1
    HTML = 2


@dataclass(frozen=True)
class Picture:
    """An SVG element, and a caption that also serves those who cannot see it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Table:
    """Cells as text. `note` stands below, row `marked` stands out, a terminal shows the first `narrow` columns; HTML
    gives the table the class `style` and shades its cells by `shades` (0 to 1), apart for those on the diagonal."""

    header: list[str]
    rows: list[list[str]]
    note: str = ""
    marked: int | None = None
    narrow: int | None = None
    style: str = ""
    shades: list[list[float]] | None = None


@dataclass(frozen=True)
class Section:
    """What every view from `least` on shows in its own way. `items` are sentences, each with the texts quoted below it;
    `draw` makes the pictures, for HTML alone; a part of a section is unfolded in HTML where it is `open`."""

    title: str
    table: Table | None = None
    sentences: Sequence[str] = ()
    items: Sequence[tuple[str, ...]] = ()
    draw: Callable[[], list[Picture]] = list
    parts: Sequence["Section"] = ()
    least: View = View.TERMINAL
    open: bool = True


def filled(
    rows: list[dict[str, str]], narrow: int | None = None, note: str = "", style: str = ""
) -> Table:
    """A table with the columns of the first row, without the empty ones; `narrow` counts the columns before."""
    header = [name for name in rows[0] if any(row.get(name) for row in rows)]
    few = None if narrow is None else sum(name in header for name in list(rows[0])[:narrow])
    return Table(
        header,
        [[row.get(name, "") for name in header] for row in rows],
        note,
        narrow=few,
        style=style,
    )


def number(value: float | None) -> str:
    """A loss or metric with four significant digits, zeros too: 1.000."""
    return "" if value is None else f"{value:#.4g}".rstrip(".")


def signed(value: float) -> str:
    """A difference of metrics, its sign always written."""
    return f"{value:+.4f}"


def names_of(values: Iterable[dict[str, float]]) -> list[str]:
    """The names in any of several sets of numbers, in the order of their first appearance."""
    return list(dict.fromkeys(name for named in values for name in named))


def percent(share: float | None, digits: int = 2) -> str:
    """A share in percent; a little does not become 0."""
    if share is None:
        return ""
    least = 10**-digits
    return f"<{least:g}" if 0 < 100 * share < least / 2 else f"{100 * share:.{digits}f}"


def cut(text: str, length: int) -> str:
    """A text on one line, of at most `length` characters; an ellipsis stands for the rest."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def plain(text: str) -> str:
    """Text from outside that stays text in Markdown, loads no picture there, and stays in one cell of a table."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", " ".join(text.split()).replace("<", "&lt;"))


def short(model: str) -> str:
    """A hub id as it is; the last part of a directory or file, since the rest is nobody else's business."""
    here = model.startswith((".", "/", "~")) or Path(model).exists()
    return Path(model).resolve().name or model if here else model


def without_owner(model: str) -> str:
    """Shorten a hub id to its last part: `org/model` to `model`."""
    return model.rpartition("/")[2]


def duration(seconds: float) -> str:
    """`90 s`, `45 min` or `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count(value: int) -> str:
    """A number of things in thousands, millions or billions."""
    units = (
        f"{value / size:.3g} {unit}"
        for unit, size in {"G": 1e9, "M": 1e6, "k": 1e3}.items()
        if value >= size
    )
    return next(units, str(value))


def shape_of(card: Card) -> str:
    """Return layers and width of a model: `6x384`."""
    return f"{card.layers}x{card.hidden}"


def on_disk(card: Card) -> str:
    """`90.9 MB`; `2.0 MB, fp16` where weights are not float32, since half the bytes are no fewer weights."""
    return bytes_of(card.bytes) + (f", {card.held_in}" if card.held_in != "fp32" else "")


def bytes_of(value: int) -> str:
    """A number of bytes in GB or MB, so that sizes can be compared; in kB where that would be 0.0 MB."""
    if value >= 10**9:
        return f"{value / 10**9:,.2f} GB"
    return f"{value / 10**6:,.1f} MB" if value >= 10**5 else f"{value / 1000:.1f} kB"
