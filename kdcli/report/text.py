"""Define the parts of a report, and write numbers and names."""

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from markupsafe import escape

from kdcli.data.objects import is_object
from kdcli.data.readers import format_of
from kdcli.data.storage import base_name
from kdcli.data.tasks import named_tasks
from kdcli.disk import is_path
from kdcli.report.schema import Comparison, Compression, Evaluation, Report
from kdcli.report.schema_decisions import Decision
from kdcli.types import OWN, Card, ModelShape, task_name

LOWER_IS_BETTER = {"loss", "mse"}  # metrics that are better when lower


class View(enum.IntEnum):
    """The views of a report. Each shows everything that the views before it show."""

    TERMINAL = 0
    MARKDOWN = 1
    HTML = 2


@dataclass(frozen=True)
class Picture:
    """An SVG element, and a caption that describes it to readers who cannot see it.

    `shown` replaces the caption below the picture where a table has the same numbers.
    """

    svg: str = field(repr=False)
    caption: str
    shown: str = ""


@dataclass(frozen=True)
class Plot:
    """Pictures that a notebook shows next to each other."""

    pictures: tuple[Picture, ...]

    def _repr_html_(self) -> str:
        # The SVG has no size of its own, and its text has the colour of the page.
        figures = (
            f'<figure style="flex: 1 1 20rem; max-width: 40rem; margin: 0.5rem">{picture.svg}'
            f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
            for picture in self.pictures
        )
        return f'<div style="display: flex; flex-wrap: wrap">{"".join(figures)}</div>'


@dataclass(frozen=True)
class Link:
    """A link to the report in a directory, which is relative to the directory of this report."""

    text: str
    folder: str

    def to(self, file: str) -> str:
        """Return the relative URL of a file in the directory."""
        return quote(f"{self.folder}/{file}")


@dataclass(frozen=True)
class ReportSection:
    """A section of a report: a table, and what belongs to it.

    Attributes:
        title: The heading.
        columns: The names of the table's columns; empty without a table.
        rows: The cells of the table, row by row.
        note: The text below the table.
        marked: The number of the emphasised row.
        narrow: The number of columns that a terminal shows; None for all.
        style: The class of the table in HTML.
        shades: The shade of each cell in HTML, from 0 to 1.
        legend: The explanation of the shades, below the table in HTML.
        sentences: The paragraphs below the table.
        items: Sentences, each followed by the texts that are quoted below it.
        links: Links to other reports, which the terminal does not show.
        draw: Makes the pictures, which only HTML shows.
        parts: The sections inside this one.
        least: The first view that shows the section.
        open: Whether HTML shows the section unfolded inside its parent.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""
    marked: int | None = None
    narrow: int | None = None
    style: str = ""
    shades: Sequence[Sequence[float]] | None = None
    legend: str = ""
    sentences: Sequence[str] = ()
    items: Sequence[tuple[str, ...]] = ()
    links: Sequence[Link] = ()
    draw: Callable[[], list[Picture]] = list
    parts: Sequence["ReportSection"] = ()
    least: View = View.TERMINAL
    open: bool = True


def filled(
    title: str,
    rows: Sequence[Mapping[str, str]],
    note: str = "",
    *,
    marked: int | None = None,
    narrow: int | None = None,
    style: str = "",
    least: View = View.TERMINAL,
    open: bool = True,
) -> ReportSection:
    """Return a table of cells by column, without the empty columns.

    Without rows, the section is empty. `narrow` counts the columns before the empty ones are
    removed.
    """
    if not rows:
        return ReportSection(title)
    names = names_in(rows)
    columns = [name for name in names if any(row.get(name) for row in rows)]
    cells = [[row.get(name, "") for name in columns] for row in rows]
    few = None if narrow is None else sum(name in columns for name in names[:narrow])
    return ReportSection(title, columns, cells, note, marked, few, style, least=least, open=open)


def number(value: float | None) -> str:
    """Write a loss or metric with four significant digits, including zeros: 1.000."""
    return "" if value is None else f"{value:#.4g}".rstrip(".")


def signed(value: float) -> str:
    """Write a difference of metrics with its sign."""
    return f"{value:+.4f}"


def names_in(values: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys of several mappings, in the order of their first appearance."""
    return list(dict.fromkeys(name for named in values for name in named))


def percent(share: float | None, digits: int = 2) -> str:
    """Write a share in percent. A small share is not rounded to 0."""
    if share is None:
        return ""
    least = 10**-digits
    return f"<{least:g}" if 0 < 100 * share < least / 2 else f"{100 * share:.{digits}f}"


def shortened_line(text: str, length: int) -> str:
    """Shorten a text to one line of at most `length` characters, with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def plain(text: str) -> str:
    """Escape a text from outside, so that it stays text in Markdown and in one cell of a table."""
    return re.sub(r"([\\`*|\[\]])", r"\\\1", " ".join(text.split()).replace("<", "&lt;"))


def fenced(block: str, language: str) -> str:
    """Return a block of Markdown that shows a text as it is, such as code in `python` or `sh`."""
    # A name in the text must not end the block.
    fence = max(["```", *(f"{run}`" for run in re.findall("`+", block))], key=len)
    return "\n".join([f"{fence}{language}", block, fence])


def short(model: str) -> str:
    """Return the last part of a path, for privacy. A hub id is returned unchanged.

    Data that Python gave as an object is `your data`, because its file is named by a hash.
    """
    if is_object(model):
        return task_name(OWN)
    here = model.startswith((".", "/", "~")) or is_path(model)
    return Path(model).resolve().name or model if here else model


def loses(lost: float, what: str) -> str:
    """Write a loss in points: `loses 0.50 points of accuracy`, or `loses no accuracy`."""
    return f"loses {lost:.2f} points of {what}" if round(lost, 2) > 0 else f"loses no {what}"


def lost_points(difference: float, low: float, high: float, sign: str = "+") -> tuple[str, str]:
    """Write a difference from the baseline as the points that were lost, and its interval.

    A loss has a plus in tables: `-0.005` becomes `+0.50`. In sentences, with `sign` "-", it has
    none.
    """
    lost, near, far = (f"{-100 * value:{sign}z.2f}" for value in (difference, high, low))
    return lost, f"{near} to {far}"


def points_interval(low: float, high: float, confidence: float, of: str = "") -> str:
    """Write an interval in points. A value that rounds to 0 has no sign."""
    return f"{100 * confidence:.3g} % interval{of} {low:z.2f} to {high:z.2f}"


def without_owner(model: str) -> str:
    """Shorten a hub id to its last part: `org/model` to `model`."""
    return model.rpartition("/")[2]


def duration(seconds: float) -> str:
    """Write a duration: `90 s`, `45 min` or `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count(value: int) -> str:
    """Write a count in thousands, millions or billions."""
    units = (
        f"{value / size:.3g} {unit}"
        for unit, size in {"G": 1e9, "M": 1e6, "k": 1e3}.items()
        if value >= size
    )
    return next(units, str(value))


def card_shape(card: Card) -> str:
    """Return the shape of a model: `6x384`, `6x384:768` or `static:256`."""
    if card.is_served:
        return f"vectors of {card.hidden}"
    return ModelShape(card.layers, card.hidden, card.ffn, card.heads).short


def paper_shape(card: Card) -> str | None:
    """Return layers and width as the papers write them, or None for other feed-forward widths.

    The papers' models have a feed-forward width of four times the hidden width. Only TinyBERT's
    4x312 has 1,200 units instead of 1,248.
    """
    has_paper_ffn = math.isclose(card.ffn, 4 * card.hidden, rel_tol=0.04)
    return f"{card.layers}x{card.hidden}" if card.layers and has_paper_ffn else None


def on_disk(card: Card) -> str:
    """Write the size of the weights, and their type if it is not float32: `2.04 MB, fp16`."""
    return bytes_of(card.bytes) + (f", {card.held_in}" if card.held_in != "fp32" else "")


def megabytes(value: float) -> str:
    """Write a number of MB so that its factor to another one is right: `16.7`, `2.07`, `0.453`.

    A few bytes are not rounded to 0: `0.000040`.
    """
    if 0 < value < 1e-4:
        return f"{value:.6f}"
    return f"{value:,.1f}" if value >= 9.995 else f"{value:#.3g}"


def bytes_of(value: int) -> str:
    """Write a number of bytes: `1.20 GB`, `16.7 MB`, `0.453 MB` or, below 0.1 MB, `45.3 kB`."""
    if value >= 10**9:
        return f"{value / 10**9:,.2f} GB"
    return f"{megabytes(value / 10**6)} MB" if value >= 10**5 else f"{value / 1000:.1f} kB"


PartT = TypeVar("PartT", Evaluation, Comparison, Decision, Compression)


def data_name(task: str, source: str | None) -> str:
    """Return the name of a task or, for the user's own rows, of their file or directory.

    A name differs from all tasks' names, because a benchmark's scores may be in the same table.
    """
    if task != OWN:
        return task
    if source is None:
        return task_name(OWN)
    name = Path(short(source)).name
    return f"{name} ({task_name(OWN)})" if name in named_tasks() else name


def directory_word(task: str, source: str | None) -> str:
    """Return the part of a run directory's name that identifies the task or the user's data.

    It is `tickets` for the rows of `data/tickets.csv`, and `reviews` for the data set
    `org/reviews@main`. Wildcards and blanks are left out: `2026` stands for `data/2026-*.csv`. Data
    that Python gave as an object is in a file that is named by a hash, so the result is the task,
    `own`.
    """
    if task != OWN or source is None or is_object(source):
        return task
    name = base_name(short(source))
    form = format_of(name)
    if form is None:
        name = name.partition("@")[0]
    else:
        name = name.removesuffix(f".{form.packed}").removesuffix(f".{form.name}")
    return "-".join(re.findall(r"[\w.+-]+", name)).strip("-") or task


def with_data_names(report: Report) -> Report:
    """Return a report in which the user's own data has its name instead of the task's, `own`.

    Only the views show it. report.json keeps the name that `--task` takes.
    """
    # In a distillation on text, the recipe's data is the text.
    is_own = report.recipe.get("task") == OWN
    name, compression = data_name(OWN, report.source if is_own else None), report.compression

    def named(part: PartT) -> PartT:
        return part.model_copy(update={"task": name}) if part.task == OWN else part

    update = {
        "evaluations": list(map(named, report.evaluations)),
        "comparisons": list(map(named, report.comparisons)),
        "decisions": list(map(named, report.decisions)),
        "quality": {_renamed(task, name): models for task, models in report.quality.items()},
        "compression": compression and named(compression),
    }
    return report.model_copy(update=update)


def _renamed(task_and_set: str, name: str) -> str:
    task, space, part = task_and_set.partition(" ")
    return f"{name}{space}{part}" if task == OWN else task_and_set
