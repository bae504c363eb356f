"""Pictures of latency: over lengths and batches, against size, against quality."""

from __future__ import annotations

from typing import Literal

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from kdcli.report.pictures.drawing import COLOURS, DASHES, INK, Picture, apart, figure, legend, logarithmic, svg
from kdcli.report.schema import LatencyRow, Report
from kdcli.report.sections.latency import PLAIN, Cell, cell_name, cells, comparable, ran_as
from kdcli.report.text import cut, names_of, percent

MOST_LINES = 12
"""Lines of one picture at most."""

LOWER_IS_BETTER = {"loss", "mse"}
"""Names of metrics of which less is better; a front is drawn of the others."""

MARKERS = "os^Dv"


def size_latency(report: Report) -> Picture | None:
    """Weights on disk against latency of the first cell, a point a model; None without latency of two."""
    rows = [row for row in comparable(report) if row.model in report.models]
    if len(rows) < 2:
        return None
    where = cell_name((rows[0].batch_size, rows[0].seq_len))
    sizes = {row.model: report.models[row.model].bytes / 1e6 for row in rows}
    right, top = max(sizes.values()) * 1.12, max(row.p50_ms for row in rows) * 1.15
    drawing, axes = figure()
    for colour, row in zip(COLOURS * len(rows), rows, strict=False):
        axes.scatter([sizes[row.model]], [row.p50_ms], color=colour, s=60, zorder=3)
    for row, height in zip(rows, apart([row.p50_ms / top for row in rows]), strict=True):
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
    axes.set_ylabel(f"median ms, {where}")
    points = "; ".join(f"{row.model} {sizes[row.model]:,.1f} MB, {row.p50_ms:.3g} ms" for row in rows)
    return Picture(svg(drawing), f"Size and latency, {where}: {points}.")


def over(report: Report, what: Literal["tokens", "batch size"]) -> Picture | None:
    """Medians over tokens or batch size, both axes logarithmic, a line for each model and what it ran on; of the cells
    that are otherwise alike, where these are most. None where there are not two."""
    varies = 1 if what == "tokens" else 0
    groups: dict[int, list[Cell]] = {}
    for cell in cells(report):
        groups.setdefault(cell[1 - varies], []).append(cell)
    most = max(map(len, groups.values()), default=0)
    alike = next((sorted(group) for group in groups.values() if len(group) == most), [])
    if len(alike) < 2:
        return None
    lines: dict[tuple[str, tuple[str, str]], dict[int, LatencyRow]] = {}
    for cell in alike:
        for row in cells(report)[cell]:
            lines.setdefault((row.model, (row.backend, row.dtype)), {})[cell[varies]] = row
    places = [cell[varies] for cell in alike]
    fixed = f"batch size {alike[0][0]}" if what == "tokens" else f"{alike[0][1]} tokens"
    return _lines(lines, places, what, fixed)


def _lines(
    lines: dict[tuple[str, tuple[str, str]], dict[int, LatencyRow]], places: list[int], what: str, fixed: str
) -> Picture:
    """A colour for each model, dashes for what it ran on."""
    models = list(dict.fromkeys(model for model, _ in lines))
    backends = list(dict.fromkeys(on for _, on in lines))
    shown = list(lines.items())[:MOST_LINES]
    columns = 3 if len(backends) == 1 else 2
    drawing, axes = figure(0.17 * max(0, -(-len(shown) // columns) - 2))
    said = []
    for (model, on), points in shown:
        number = models.index(model)
        name = model if len(backends) == 1 else ran_as(next(iter(points.values())))
        axes.plot(
            list(points),
            [row.p50_ms for row in points.values()],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[backends.index(on) % len(DASHES)],
            linewidth=1.6,
            marker=MARKERS[number // len(COLOURS) % len(MARKERS)],
            markersize=3.5,
            label=cut(name, 26),
        )
        said.append(f"{name} " + ", ".join(f"{row.p50_ms:.3g} ({place})" for place, row in points.items()))
    logarithmic(axes, [row.p50_ms for _, points in shown for row in points.values()])
    axes.set_xscale("log")
    axes.set_xticks(places, [str(place) for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{what}, with {fixed}")
    axes.set_ylabel("median ms")
    legend(drawing, columns)
    left_out = f" The first {len(shown)} of {len(lines)} lines." if len(shown) < len(lines) else ""
    return Picture(
        svg(drawing), f"Median milliseconds by {what}, {fixed}, both axes logarithmic: {'; '.join(said)}.{left_out}"
    )


def quality_against(report: Report, what: Literal["latency", "size", "density"]) -> Picture | None:
    """A metric of a task against latency of the first cell, size or density: the models that no other beats in both,
    joined by a line, the others hollow; None without two models that were judged and measured."""
    unit, label, found = _costs(report, what)
    task, metric, of = _judged(report, list(found))
    if len(of) < 2:
        return None
    places = {name: found[name] for name in of}
    front = _front({name: (places[name], of[name]) for name in of})
    drawing, axes = figure()
    low, high = min(of.values()), max(of.values())
    margin = 0.12 * (high - low) or 0.05 * abs(high) or 1.0
    bottom, top = low - margin, high + 1.5 * margin
    axes.step(
        [places[name] for name in front], [of[name] for name in front], where="post", color=INK, linewidth=1, alpha=0.7
    )
    heights = apart([(value - bottom) / (top - bottom) for value in of.values()])
    least, most = min(places.values()), max(places.values())
    wide = most / least > 8
    middle = (least * most) ** 0.5 if wide else 0.6 * most
    for number, (name, height) in enumerate(zip(of, heights, strict=True)):
        colour, beyond = COLOURS[number % len(COLOURS)], places[name] > middle
        face = colour if name in front else "none"
        axes.scatter([places[name]], [of[name]], facecolors=face, edgecolors=colour, linewidths=1.6, s=55, zorder=3)
        axes.annotate(
            cut(name.rpartition("/")[2], 24),
            (places[name], of[name]),
            # Above the line that leaves a point to its right.
            xytext=(-8 if beyond else 8, bottom + (height + 0.045) * (top - bottom)),
            textcoords=("offset points", "data"),
            ha="right" if beyond else "left",
            va="center",
            fontsize=9,
            color=INK,
        ).set_in_layout(False)
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(least / 1.3, most * 1.3)
    else:
        axes.set_xlim(0, most * 1.12)
    axes.set_ylim(bottom, top)
    axes.set_xlabel(label)
    axes.set_ylabel(cut(f"{metric} on {task}", 40))
    title = f"{metric} on {task} against {what} ({label})"
    rows = comparable(report)
    beside = what == "latency" and (rows[0].backend, rows[0].dtype) not in PLAIN
    return Picture(svg(drawing), _front_in_words(title, of, places, unit, front, beside))


def _costs(report: Report, what: Literal["latency", "size", "density"]) -> tuple[str, str, dict[str, float]]:
    """Unit, name of the axis, and what each model costs; of pruned ones only what differs."""
    if what == "density":
        # Nothing of the first model is gone.
        kept = dict.fromkeys(list(report.models)[:1], 100.0) | {p.model: 100 * p.density for p in report.pruning}
        several = len({percent(p.density, 1) for p in report.pruning}) > 1
        return "%", "weights kept, %", kept if several else {}
    rows = [row for row in comparable(report) if row.model in report.models]
    if what == "latency":
        on = f"{rows[0].backend} {rows[0].dtype}" if rows else ""
        label = f"median ms, {cell_name((rows[0].batch_size, rows[0].seq_len))}, {on}" if rows else ""
        return "ms", label, {row.model: row.p50_ms for row in rows}
    names = [p.model for p in report.pruning if p.model in report.models] or [row.model for row in rows]
    sizes = {name: report.models[name].bytes / 1e6 for name in names}
    return "MB", "weights, MB", {} if report.pruning and len(set(sizes.values())) == 1 else sizes


def _judged(report: Report, models: list[str]) -> tuple[str, str, dict[str, float]]:
    """The task and metric that most of the models have, and what each reached; of metrics that more is better of."""
    found = [
        (task, metric, {m: of[m][metric] for m in models if metric in of.get(m, {})})
        for task, of in report.quality.items()
        for metric in names_of(of.values())
        if metric not in LOWER_IS_BETTER
    ]
    return max(found, key=lambda one: len(one[2]), default=("", "", {}))


def _front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names, by rising cost, of those (cost, quality) that beat everything cheaper."""
    found: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not found or points[name][1] > points[found[-1]][1]:
            found.append(name)
    return found


def _front_in_words(
    what: str, of: dict[str, float], places: dict[str, float], unit: str, front: list[str], beside: bool
) -> str:
    said = "; ".join(f"{name} {places[name]:.4g} {unit}, {value:.4g}" for name, value in of.items())
    text = f"{what}: {said}. On the line: {', '.join(front)}."
    beaten = [name for name in of if name not in front]
    if beaten:
        text += f" Hollow, since another is at least as good in both: {', '.join(beaten)}."
    if beside:
        text += " The quality is that of the weights, not of this backend."
    return text
