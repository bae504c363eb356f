"""The pictures of a report, and what they show in words: training, settings, latency over lengths, size and quality."""

import itertools
from collections.abc import Callable
from typing import Literal

from kdcli.report.charts.drawing import (
    COLOURS,
    DASHES,
    INK,
    Line,
    line_chart,
    scatter_chart,
    svg,
    ticks,
)
from kdcli.report.schema import AT, UNDISTILLED, CurvePoint, LatencyRow, Report
from kdcli.report.sections.latency import (
    BENCHMARK,
    PLAIN,
    Cell,
    cell_name,
    cells,
    comparable,
    ran_as,
    scored_as,
)
from kdcli.report.sections.selection import by_setting, spread
from kdcli.report.text import Picture, cut, names_of, number, percent

# The held-out term of a model that is trained with another, and what its line is called where it has one beside it.
HARD, TOGETHER = "/hard", "together"
MOST_LINES = 12  # Lines of one picture at most
LOWER_IS_BETTER = {
    "loss",
    "mse",
}  # Names of metrics of which less is better; a front is drawn of the others
MARKERS = "os^Dv"
MOST_TERMS = 9  # Lines of held-out terms that a picture can hold


def pictures(report: Report) -> list[Picture]:
    """Those that the report has numbers for; the ones of a pruned model stand with its numbers."""
    drawn = [
        *_beside_curves(report),
        *_growth(report),
        _loss_curve(report),
        _metric_curve(report),
        _setting_curve(report),
    ]
    if report.command == BENCHMARK:
        drawn += [quality_against(report, "latency"), quality_against(report, "size")]
        drawn += [latency_over(report, "tokens"), latency_over(report, "batch size")]
    if len(report.pruning) > 1:
        drawn += [quality_against(report, "density"), quality_against(report, "size")]
    drawn.append(size_latency(report))
    return [p for p in drawn if p is not None]


def _ends(lines: list[Line], written: Callable[[float], str] = number) -> str:
    """The first and the last value of every line, in words."""
    return ", ".join(
        f"{ln.label} {written(ln.points[0][1])} → {written(ln.points[-1][1])}" for ln in lines
    )


def _loss_curve(report: Report) -> Picture | None:
    """Training loss and held-out terms over steps, logarithmic; None when nothing was logged."""
    training = [(p.step, p.loss) for p in report.curve if p.loss is not None]
    held = [(p.step, p.held_out) for p in report.curve if p.held_out]
    if len(training) < 2:
        return None
    first = held[0][1] if held else {}
    names = [n for n in first if n != "loss"] or list(first)
    if len(names) > MOST_TERMS:
        # A line a student, the sum of its terms.
        named = [
            (step, [(n.rpartition("/")[0], losses[n]) for n in names]) for step, losses in held
        ]
        held = [
            (step, {f"{s}/": sum(v for of, v in own if of == s) for s, _ in own})
            for step, own in named
        ]
        names = list(held[0][1])
    students, terms = (list(dict.fromkeys(n.rpartition("/")[i] for n in names)) for i in (0, 2))
    # Several students: a colour each, their terms by dashes. One: a colour for each term.
    several = len(students) > 1
    lines = []
    for name in names:
        student, _, term = name.rpartition("/")
        place, dash = (
            students.index(student) if several else terms.index(term),
            DASHES[terms.index(term) % len(DASHES)],
        )
        dash = dash if term else DASHES[place // len(COLOURS) % len(DASHES)]
        points = [(step, losses[name]) for step, losses in held]
        lines.append(
            Line(
                f"held-out {name.removesuffix('/')}",
                points,
                COLOURS[place % len(COLOURS)],
                dash if several else "-",
            )
        )
    total = Line(
        "training, all of them" if several else "training", training, INK, marker="", width=0.9
    )
    drawing, _ = line_chart([total, *lines], "step", columns=3 if len(names) < 3 else 2, log=True)
    steps = f"Loss over {report.curve[-1].step:,} steps"
    ends = _ends(lines).replace("held-out ", "")
    return Picture(
        svg(drawing),
        f"{steps}; on what is held out, never trained on: {ends}." if ends else f"{steps}.",
    )


def _beside_curves(report: Report) -> list[Picture]:
    """Of each model the held-out loss against the labels, beside that of the same model in the runs that this one is
    compared with; none where there are no such runs. The start, from which all come, would hide what differs."""
    curves = {TOGETHER: report.curve, **report.beside}
    here = _held_out(report.curve)
    drawn = []
    for term in [
        name for name in (here[0][1] if here and report.beside else {}) if name.endswith(HARD)
    ]:
        model = term.removesuffix(HARD)
        styles = zip(COLOURS, itertools.cycle(DASHES), strict=False)
        lines = [
            Line(
                name,
                [(step, losses[term]) for step, losses in _held_out(curve) if term in losses],
                colour,
                dash,
            )
            for (name, curve), (colour, dash) in zip(curves.items(), styles, strict=False)
        ]
        if min(len(line.points) for line in lines) < 2:
            continue
        drawing, _ = line_chart(lines, "step", f"held-out loss of {cut(model, 24)}", columns=2)
        since = f"step {here[0][0]:,} on"
        # Runs from one start differ in the fourth decimal.
        ends = _ends(lines, "{:.4f}".format)
        drawn.append(
            Picture(svg(drawing), f"{model}: held-out loss against the labels, {since}: {ends}.")
        )
    return drawn


def _growth(report: Report) -> list[Picture]:
    """Quality of every student over the tokens it was distilled on, beside the undistilled ones as dashed lines."""
    drawn: list[Picture] = []
    if report.training is None:
        return drawn
    each, end = report.training.tokens / max(1, report.training.steps), report.training.tokens / 1e6
    for task, by_model in report.quality.items():
        students = list(dict.fromkeys(model.partition(AT)[0] for model in by_model if AT in model))
        metric = next(iter(next(iter(by_model.values()), {})), "")
        lines: list[Line] = []
        for name, colour in zip(students, itertools.cycle(COLOURS), strict=False):
            found = {
                int(m.partition(AT)[2]): v[metric]
                for m, v in by_model.items()
                if m.startswith(name + AT)
            }
            points = [(step * each / 1e6, value) for step, value in sorted(found.items())]
            turn = MARKERS[len(lines) // len(COLOURS) % len(MARKERS)]
            lines.append(Line(name, [*points, (end, by_model[name][metric])], colour, marker=turn))
        start = min((line.points[0][0] for line in lines), default=0.0)
        for name, values in by_model.items() if lines else ():
            if name.endswith(UNDISTILLED):
                lines.append(
                    Line(
                        name, [(start, values[metric]), (end, values[metric])], INK, "--", marker=""
                    )
                )
        if lines:
            drawing, axes = line_chart(
                lines, "million tokens", cut(f"{metric} on {task}", 40), columns=2
            )
            ticks(axes, sorted({x for line in lines for x, _ in line.points}), log=start * 8 <= end)
            drawn.append(
                Picture(
                    svg(drawing),
                    f"{metric} on {task} over the tokens distilled on: {_ends(lines)}.",
                )
            )
    return drawn


def _held_out(curve: list[CurvePoint]) -> list[tuple[int, dict[str, float]]]:
    """The held-out losses after the start."""
    return [(p.step, p.held_out) for p in curve if p.held_out and p.step]


def _metric_curve(report: Report) -> Picture | None:
    """Metrics of a task on the validation set over steps; None when they were taken less than twice."""
    points = [(p.step, p.metrics) for p in report.curve if p.metrics]
    if len(points) < 2:
        return None
    names = names_of(metrics for _, metrics in points)
    lines = [
        Line(name, [(step, metrics[name]) for step, metrics in points if name in metrics], colour)
        for colour, name in zip(COLOURS, names, strict=False)
    ]
    drawing, _ = line_chart(lines, "step", columns=3 if len(lines) <= 3 else 2)
    left_out = (
        f" The first {len(lines)} of {len(names)} metrics." if len(lines) < len(names) else ""
    )
    return Picture(svg(drawing), f"On the validation set while training: {_ends(lines)}.{left_out}")


def _setting_curve(report: Report) -> Picture | None:
    """The metric of the choice over the one numeric setting that differs, mean and spread over seeds; else None."""
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
        value, values = (
            settings.get(key),
            [run.metrics[metric] for run in runs if metric in run.metrics],
        )
        if isinstance(value, str) or value is None or not values:
            return None
        points.append((value, *spread(values)))
    points.sort()
    places, means, deviations = zip(*points, strict=True)
    line = Line("", list(zip(places, means, strict=True)), COLOURS[0])
    drawing, axes = line_chart([line], cut(key, 40), cut(f"{metric} on {report.selection.on}", 40))
    style = {"fmt": "none", "ecolor": COLOURS[0], "elinewidth": 1.2, "capsize": 4}
    axes.errorbar(places, means, yerr=[deviation or 0.0 for deviation in deviations], **style)
    ticks(axes, places, log=places[0] > 0 and places[-1] / places[0] >= 8)
    words = "; ".join(
        f"{x:g} {number(y)}" + (f" ± {sd:.2g}" if sd is not None else "") for x, y, sd in points
    )
    return Picture(
        svg(drawing), f"{metric} over {key}, mean ± sample standard deviation over seeds: {words}."
    )


def size_latency(report: Report) -> Picture | None:
    """Weights on disk against latency of the first cell, a point a model; None without latency of two."""
    rows = [row for row in comparable(report) if row.model in report.models]
    if len(rows) < 2:
        return None
    cards = {row.model: report.models[row.model] for row in rows}
    shapes = {name: f"{card.layers}x{card.hidden}" for name, card in cards.items()}
    points = {row.model: (cards[row.model].bytes / 1e6, row.p50_ms) for row in rows}
    labels = {n: n if s in n else f"{cut(n.rpartition('/')[2], 24)} {s}" for n, s in shapes.items()}
    where = cell_name((rows[0].batch_size, rows[0].seq_len))
    words = "; ".join(f"{name} {size:,.1f} MB, {ms:.3g} ms" for name, (size, ms) in points.items())
    drawing = scatter_chart(points, labels, "weights, MB", f"median ms, {where}", zero=True)
    return Picture(drawing, f"Size and latency, {where}: {words}.")


def latency_over(report: Report, what: Literal["tokens", "batch size"]) -> Picture | None:
    """Medians over tokens or batch size, both axes logarithmic: a colour for each model, dashes for what it ran on. The
    cells that are otherwise alike, where these are most; None where there are not two."""
    varies = 1 if what == "tokens" else 0
    groups: dict[int, list[Cell]] = {}
    for cell in cells(report):
        groups.setdefault(cell[1 - varies], []).append(cell)
    alike: list[Cell] = max(map(sorted, groups.values()), key=len, default=[])
    if len(alike) < 2:
        return None
    rows: dict[tuple[str, tuple[str, str]], dict[int, LatencyRow]] = {}
    for cell in alike:
        for row in cells(report)[cell]:
            rows.setdefault((row.model, (row.backend, row.dtype)), {})[cell[varies]] = row
    models, backends = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    lines = []
    for (model, on), by_place in list(rows.items())[:MOST_LINES]:
        turn, place = divmod(models.index(model), len(COLOURS))
        name = model if len(backends) == 1 else ran_as(next(iter(by_place.values())))
        points = [(x, row.p50_ms) for x, row in by_place.items()]
        style = (
            COLOURS[place],
            DASHES[backends.index(on) % len(DASHES)],
            MARKERS[turn % len(MARKERS)],
        )
        lines.append(Line(name, points, *style))
    columns = 3 if len(backends) == 1 else 2
    taller = 0.17 * max(0, -(-len(lines) // columns) - 2)
    fixed = f"batch size {alike[0][0]}" if what == "tokens" else f"{alike[0][1]} tokens"
    drawing, axes = line_chart(
        lines, f"{what}, with {fixed}", "median ms", columns=columns, log=True, taller=taller
    )
    ticks(axes, [cell[varies] for cell in alike], log=True)
    words = "; ".join(
        f"{line.label} " + ", ".join(f"{ms:.3g} ({x})" for x, ms in line.points) for line in lines
    )
    left_out = f" The first {len(lines)} of {len(rows)} lines." if len(lines) < len(rows) else ""
    return Picture(
        svg(drawing),
        f"Median milliseconds by {what}, {fixed}, both axes logarithmic: {words}.{left_out}",
    )


def quality_against(report: Report, what: Literal["latency", "size", "density"]) -> Picture | None:
    """A metric of a task against latency of the first cell, size or density: the models that no other beats in both,
    joined by a line, the others hollow; None without two models that were scored and measured."""
    unit, label, costs = _costs(report, what)
    task, metric, quality = _most_scored(report, list(costs))
    if len(quality) < 2:
        return None
    points = {name: (costs[name], value) for name, value in quality.items()}
    front = front_of(points)
    labels = {name: cut(name.rpartition("/")[2], 24) for name in points}
    drawing = scatter_chart(points, labels, label, cut(f"{metric} on {task}", 40), front=front)
    words = "; ".join(
        f"{name} {cost:.4g} {unit}, {number(value)}" for name, (cost, value) in points.items()
    )
    text = f"{metric} on {task} against {what} ({label}): {words}. On the line: {', '.join(front)}."
    if beaten := [name for name in points if name not in front]:
        text += f" Hollow, since another is at least as good in both: {', '.join(beaten)}."
    rows = comparable(report)
    if (
        what == "latency"
        and not _by_backend(report)
        and (rows[0].backend, rows[0].dtype) not in PLAIN
    ):
        text += " The quality is that of the weights, not of this backend."
    return Picture(drawing, text)


def _costs(
    report: Report, what: Literal["latency", "size", "density"]
) -> tuple[str, str, dict[str, float]]:
    """Unit, name of the axis, and what each model costs; of pruned ones only what differs."""
    if what == "density":
        # Nothing of the first model is gone.
        kept = dict.fromkeys(list(report.models)[:1], 100.0) | {
            p.model: 100 * p.density for p in report.pruning
        }
        several = len({percent(p.density, 1) for p in report.pruning}) > 1
        return "%", "weights kept, %", kept if several else {}
    if what == "latency" and (scored := _by_backend(report)):
        row = next(iter(cells(report).values()))[0]
        return "ms", f"median ms, {cell_name((row.batch_size, row.seq_len))}", scored
    rows = [row for row in comparable(report) if row.model in report.models]
    if what == "latency":
        on = f"{rows[0].backend} {rows[0].dtype}" if rows else ""
        label = (
            f"median ms, {cell_name((rows[0].batch_size, rows[0].seq_len))}, {on}" if rows else ""
        )
        return "ms", label, {row.model: row.p50_ms for row in rows}
    measured = dict.fromkeys(
        row.model for row in next(iter(cells(report).values()), []) if row.model in report.models
    )
    names = [p.model for p in report.pruning if p.model in report.models] or list(measured)
    sizes = {name: report.models[name].bytes / 1e6 for name in names}
    return "MB", "weights, MB", {} if report.pruning and len(set(sizes.values())) == 1 else sizes


def _by_backend(report: Report) -> dict[str, float]:
    """Medians of the first cell under the names that scores have, such as `MODEL on onnx int8`; empty where only the
    rows that are comparable were scored."""
    rows = next(iter(cells(report).values()), [])
    scored = {name for models in report.quality.values() for name in models}
    found: dict[str, float] = {}
    for row in rows:
        if (name := scored_as(row, scored)) in scored:
            found.setdefault(name, row.p50_ms)
    return found if found.keys() - {row.model for row in comparable(report)} else {}


def _most_scored(report: Report, models: list[str]) -> tuple[str, str, dict[str, float]]:
    """The task and metric that most of the models have, and their values; of metrics that more is better of."""
    candidates = [
        (task, metric, {m: values[m][metric] for m in models if metric in values.get(m, {})})
        for task, values in report.quality.items()
        for metric in names_of(values.values())
        if metric not in LOWER_IS_BETTER
    ]
    return max(candidates, key=lambda one: len(one[2]), default=("", "", {}))


def front_of(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names, by rising cost, of those (cost, quality) that beat everything cheaper."""
    front: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not front or points[name][1] > points[front[-1]][1]:
            front.append(name)
    return front
