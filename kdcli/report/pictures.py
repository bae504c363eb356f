"""The pictures of a report, as SVG text without a title bar, script or font file, and what they show in words."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from kdcli.report.schema import LatencyRow, Report
from kdcli.report.selection import by_setting, spread
from kdcli.report.text import cut, names_of

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


def pictures(report: Report) -> list[Picture]:
    """Those that the report has numbers for."""
    found = [_loss_curve(report), _metric_curve(report), _setting_curve(report), _size_latency(report)]
    return [p for p in found if p is not None]


def _loss_curve(report: Report) -> Picture | None:
    """Training loss and held-out terms over steps, logarithmic; None when nothing was logged."""
    training = [(p.step, p.loss) for p in report.curve if p.loss is not None]
    held = [(p.step, p.held_out) for p in report.curve if p.held_out]
    if len(training) < 2:
        return None
    first = held[0][1] if held else {}
    names = [n for n in first if n != "loss"] or list(first)
    students = list(dict.fromkeys(n.rpartition("/")[0] for n in names))
    terms = list(dict.fromkeys(n.rpartition("/")[2] for n in names))
    figure, axes = _figure()
    axes.plot(
        *zip(*training, strict=True),
        color=INK,
        linewidth=0.9,
        label="training" if len(students) < 2 else "training, all students",
    )
    for name in names:
        student, _, term = name.rpartition("/")
        # Several students: a colour each, their terms by dashes. One: a colour for each term.
        several = len(students) > 1
        number = students.index(student) if several else terms.index(term)
        axes.plot(
            [step for step, _ in held],
            [of[name] for _, of in held],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[terms.index(term) % len(DASHES)] if several else "-",
            linewidth=1.6,
            marker="o",
            markersize=2.5,
            label=f"held-out {name}",
        )
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _logarithmic(axes, [v for _, v in training] + [of[n] for _, of in held for n in names])
    _legend(figure, 3 if len(names) < 3 else 2)
    ends = ", ".join(f"{n} {held[0][1][n]:.3g} → {held[-1][1][n]:.3g}" for n in names)
    steps = f"Loss over {report.curve[-1].step:,} steps"
    return Picture(_svg(figure), f"{steps}; on held-out text, never trained on: {ends}." if ends else f"{steps}.")


def _metric_curve(report: Report) -> Picture | None:
    """Metrics of a task on the validation set over steps; None when they were taken less than twice."""
    points = [(p.step, p.metrics) for p in report.curve if p.metrics]
    if len(points) < 2:
        return None
    names = names_of(metrics for _, metrics in points)
    shown = names[: len(COLOURS)]
    figure, axes = _figure()
    ends = []
    for colour, name in zip(COLOURS, shown, strict=False):
        own = [(step, metrics[name]) for step, metrics in points if name in metrics]
        axes.plot(*zip(*own, strict=True), color=colour, linewidth=1.6, marker="o", markersize=3, label=cut(name, 24))
        ends.append(f"{name} {own[0][1]:.4g} → {own[-1][1]:.4g}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _legend(figure, 3 if len(shown) <= 3 else 2)
    left_out = f" The first {len(shown)} of {len(names)} metrics." if len(shown) < len(names) else ""
    return Picture(_svg(figure), f"On the validation set while training: {', '.join(ends)}.{left_out}")


def _setting_curve(report: Report) -> Picture | None:
    """What one was chosen by over the one numeric setting that differs, mean and spread over seeds; else None."""
    if report.selection is None:
        return None
    metric, groups = report.selection.metric, by_setting(report.selection)
    keys = {key for settings, _ in groups for key in settings}
    differ = [key for key in keys if len({settings.get(key) for settings, _ in groups}) > 1]
    if len(groups) < 2 or len(differ) != 1:
        return None
    key = differ[0]
    points = []
    for settings, runs in groups:
        value, found = settings.get(key), [run.metrics[metric] for run in runs if metric in run.metrics]
        if isinstance(value, str) or value is None or not found:
            return None
        points.append((value, *spread(found)))
    points.sort()
    places = [value for value, *_ in points]
    figure, axes = _figure()
    axes.errorbar(
        places,
        [mean for _, mean, _ in points],
        yerr=[deviation or 0.0 for *_, deviation in points],
        color=COLOURS[0],
        linewidth=1.6,
        elinewidth=1.2,
        capsize=4,
        marker="o",
        markersize=4,
    )
    if places[0] > 0 and places[-1] / places[0] >= 8:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(cut(key, 40))
    axes.set_ylabel(cut(f"{metric} on {report.selection.on}", 40))
    said = "; ".join(f"{place:g} {mean:.4g}" + (f" ± {sd:.2g}" if sd is not None else "") for place, mean, sd in points)
    return Picture(_svg(figure), f"{metric} over {key}, mean ± sample standard deviation over seeds: {said}.")


def _legend(figure: Figure, columns: int) -> None:
    figure.legend(
        loc="outside upper left",
        ncols=columns,
        columnspacing=1.2,
        handlelength=1.5,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )


def _logarithmic(axes: Any, values: list[float]) -> None:
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


def _size_latency(report: Report) -> Picture | None:
    """Weights on disk against latency of the first cell, a point a model; None without latency of two."""
    first = report.latency[0] if report.latency else None
    cell = [
        row
        for row in report.latency
        if first and row.model in report.models and (row.batch_size, row.seq_len) == (first.batch_size, first.seq_len)
    ]
    if first is None or len(cell) < 2:
        return None
    sizes = {row.model: report.models[row.model].bytes / 1e6 for row in cell}
    right, top = max(sizes.values()) * 1.12, max(row.p50_ms for row in cell) * 1.15
    figure, axes = _figure()
    for colour, row in zip(COLOURS * len(cell), cell, strict=False):
        axes.scatter([sizes[row.model]], [row.p50_ms], color=colour, s=60, zorder=3)
    for row, height in zip(cell, _apart([row.p50_ms / top for row in cell]), strict=True):
        card, beyond = report.models[row.model], sizes[row.model] > 0.6 * right
        shape = f"{card.layers}x{card.hidden}"
        label = axes.annotate(
            row.model if shape in row.model else f"{cut(row.model.rpartition('/')[2], 24)} {shape}",
            (sizes[row.model], row.p50_ms),
            xytext=(sizes[row.model] + (-0.03 if beyond else 0.03) * right, height * top),
            ha="right" if beyond else "left",
            va="center",
            fontsize=9,
            color=INK,
        )
        # A long name runs over the edge rather than press the axes together.
        label.set_in_layout(False)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel("weights, MB")
    axes.set_ylabel(f"median ms, {_cell(first)}")
    points = "; ".join(f"{row.model} {sizes[row.model]:,.1f} MB, {row.p50_ms:.3g} ms" for row in cell)
    return Picture(_svg(figure), f"Size and latency, {_cell(first)}: {points}.")


def _apart(heights: list[float], gap: float = 0.07) -> list[float]:
    """Heights of labels (fractions of the axis), moved up as far as it takes for none to lie on another."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    last = -1.0
    for i in sorted(placed, key=heights.__getitem__):
        last = placed[i] = max(heights[i], last + gap)
    return list(placed.values())


def _cell(row: LatencyRow) -> str:
    return f"{row.batch_size} × {row.seq_len} tokens"


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0, pad=6)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    return figure, axes


def _svg(figure: Figure) -> str:
    for label in figure.findobj(Text):
        # A dollar sign in a name is a dollar sign.
        label.set_parse_math(False)
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kdcli", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    # Without a size of its own the picture takes the width of its place on the page.
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg[svg.index("<svg") :], count=2)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    return svg.replace(INK, "currentColor")
