"""How every picture of a report looks: SVG text without a title bar, script or font file."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLOURS = ["#2f74ff", "#e07b00", "#12966b", "#a855f7", "#e0365c", "#0a95b8"]
"""Readable on a white and on a black page."""

DASHES = ["-", "--", ":", "-."]
INK = "#778899"
"""Stands for the page's own text colour, so that one picture serves a light and a dark page."""

WIDTH, HEIGHT = 4.8, 3.2
"""Inches. Narrow, so that on a telephone the labels are not scaled below reading."""


@dataclass(frozen=True)
class Picture:
    """An SVG element, and a caption that also serves those who cannot see it."""

    svg: str
    caption: str


def figure(taller: float = 0.0) -> tuple[Figure, Any]:
    """A figure, `taller` by so many inches, and its axes in the manner of all pictures."""
    drawing = Figure(figsize=(WIDTH, HEIGHT + taller), layout="constrained")
    axes = drawing.add_subplot()
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0, pad=6)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.patch.set_alpha(0)
    drawing.patch.set_alpha(0)
    return drawing, axes


def svg(drawing: Figure) -> str:
    """The figure as an SVG element that takes width and ink of its place."""
    for label in drawing.findobj(Text):
        # A dollar sign in a name is a dollar sign.
        label.set_parse_math(False)
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kdcli", "font.family": "sans-serif"}):
        drawing.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    made = text.getvalue()
    # Without a size of its own the picture takes the width of its place on the page.
    made = re.sub(r' (width|height)="[\d.]+pt"', "", made[made.index("<svg") :], count=2)
    made = re.sub(r"<metadata>.*?</metadata>", "", made, flags=re.S)
    return made.replace(INK, "currentColor")


def legend(drawing: Figure, columns: int) -> None:
    """The legend of all labelled lines, above the axes."""
    drawing.legend(
        loc="outside upper left",
        ncols=columns,
        columnspacing=1.2,
        handlelength=1.5,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )


def logarithmic(axes: Any, values: list[float]) -> None:
    """A logarithmic scale with plain numbers; a loss of zero, of a student that equals its teacher, has no place."""
    positive = [v for v in values if v > 0]
    if not positive:
        return
    axes.set_yscale("log")
    axes.set_ylim(min(positive) / 1.3, max(positive) * 1.3)
    decades = max(positive) / min(positive)
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if decades > 1e3 else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def apart(heights: list[float], gap: float = 0.07) -> list[float]:
    """Heights of labels (fractions of the axis), moved up as far as it takes for none to lie on another."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    last = -1.0
    for i in sorted(placed, key=heights.__getitem__):
        last = placed[i] = max(heights[i], last + gap)
    return list(placed.values())
