"""The two pictures of a report, as SVG text without a title bar, script or font file."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from kdcli.report.schema import Report

COLOURS = ["#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2"]
# Text and axes take the page's own colour, so that one picture serves a light and a dark page.
INK = "#778899"


def loss_curve(report: Report) -> str | None:
    """Training loss and held-out terms over steps, logarithmic; None when nothing was logged."""
    training = [(p.step, p.loss) for p in report.curve if p.loss is not None]
    held = [(p.step, p.held_out) for p in report.curve if p.held_out]
    if len(training) < 2:
        return None
    figure, axes = _figure()
    axes.plot(*zip(*training, strict=True), color=INK, linewidth=0.9, alpha=0.8, label="training loss")
    names = [n for n in (held[0][1] if held else {}) if n != "loss"]
    for colour, name in zip(COLOURS * 3, names, strict=False):
        axes.plot(
            [step for step, _ in held],
            [of[name] for _, of in held],
            color=colour,
            linewidth=1.8,
            marker="o",
            markersize=3,
            label=f"held-out {name}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _legend(axes)
    return _svg(figure)


def size_latency(report: Report) -> str | None:
    """Weights on disk against latency of the first cell, a point a model; None without latency."""
    if not report.latency:
        return None
    first = report.latency[0]
    cell = [r for r in report.latency if (r.batch_size, r.seq_len) == (first.batch_size, first.seq_len)]
    figure, axes = _figure()
    for colour, row in zip(COLOURS * 3, cell, strict=False):
        size = report.models[row.model].bytes / 1e6
        axes.scatter([size], [row.p50_ms], color=colour, s=70, zorder=3)
        axes.annotate(
            row.model,
            (size, row.p50_ms),
            xytext=(0, 9),
            textcoords="offset points",
            color=INK,
            ha="center",
            fontsize=10,
        )
    axes.set_xlim(0, max(report.models[r.model].bytes / 1e6 for r in cell) * 1.2)
    axes.set_ylim(0, max(r.p50_ms for r in cell) * 1.25)
    axes.set_xlabel("weights, MB")
    axes.set_ylabel(f"median ms, {first.batch_size} x {first.seq_len} tokens")
    return _svg(figure)


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, color=INK, alpha=0.2, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    return figure, axes


def _legend(axes: Any) -> None:
    for text in axes.legend(frameon=False, fontsize=9).get_texts():
        text.set_color(INK)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kdcli", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    # Without a size of its own the picture takes the width of its place on the page.
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg[svg.index("<svg") :], count=2)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
