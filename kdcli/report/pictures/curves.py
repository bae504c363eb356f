"""The pictures of a report, and what they show in words: losses, metrics and settings over training."""

from __future__ import annotations

import itertools

from kdcli.report.pictures.drawing import COLOURS, DASHES, INK, Line, line_chart, svg, ticks
from kdcli.report.pictures.latency import latency_over, quality_against, size_latency
from kdcli.report.schema import CurvePoint, Report
from kdcli.report.sections.latency import BENCHMARK
from kdcli.report.sections.selection import by_setting, spread
from kdcli.report.text import Picture, cut, names_of, number

# The held-out term of a model that is trained with another, and what its line is called where it has one beside it.
HARD, TOGETHER = "/hard", "together"


def pictures(report: Report) -> list[Picture]:
    """Those that the report has numbers for; the ones of a pruned model stand with its numbers."""
    found = [*_beside_curves(report), _loss_curve(report), _metric_curve(report), _setting_curve(report)]
    if report.command == BENCHMARK:
        found += [quality_against(report, "latency"), quality_against(report, "size")]
        found += [latency_over(report, "tokens"), latency_over(report, "batch size")]
    if len(report.pruning) > 1:
        found += [quality_against(report, "density"), quality_against(report, "size")]
    found.append(size_latency(report))
    return [p for p in found if p is not None]


def _ends(lines: list[Line]) -> str:
    """The first and the last value of every line, in words."""
    return ", ".join(f"{line.label} {number(line.points[0][1])} → {number(line.points[-1][1])}" for line in lines)


def _loss_curve(report: Report) -> Picture | None:
    """Training loss and held-out terms over steps, logarithmic; None when nothing was logged."""
    training = [(p.step, p.loss) for p in report.curve if p.loss is not None]
    held = [(p.step, p.held_out) for p in report.curve if p.held_out]
    if len(training) < 2:
        return None
    first = held[0][1] if held else {}
    names = [n for n in first if n != "loss"] or list(first)
    students, terms = (list(dict.fromkeys(n.rpartition("/")[i] for n in names)) for i in (0, 2))
    # Several students: a colour each, their terms by dashes. One: a colour for each term.
    several = len(students) > 1
    lines = []
    for name in names:
        student, _, term = name.rpartition("/")
        place, dash = students.index(student) if several else terms.index(term), DASHES[terms.index(term) % len(DASHES)]
        points = [(step, losses[name]) for step, losses in held]
        lines.append(Line(f"held-out {name}", points, COLOURS[place % len(COLOURS)], dash if several else "-"))
    total = Line("training, all of them" if several else "training", training, INK, marker="", width=0.9)
    drawing, _ = line_chart([total, *lines], "step", columns=3 if len(names) < 3 else 2, log=True)
    steps = f"Loss over {report.curve[-1].step:,} steps"
    ends = _ends(lines).replace("held-out ", "")
    return Picture(svg(drawing), f"{steps}; on what is held out, never trained on: {ends}." if ends else f"{steps}.")


def _beside_curves(report: Report) -> list[Picture]:
    """Of each model the held-out loss against the labels, beside that of the same model in the runs that this one is
    compared with; none where there are no such runs. The start, from which all come, would hide what differs."""
    curves = {TOGETHER: report.curve, **report.beside}
    here = _held_out(report.curve)
    found = []
    for term in [name for name in (here[0][1] if here and report.beside else {}) if name.endswith(HARD)]:
        model = term.removesuffix(HARD)
        styles = zip(COLOURS, itertools.cycle(DASHES), strict=False)
        lines = [
            Line(name, [(step, losses[term]) for step, losses in _held_out(curve) if term in losses], colour, dash)
            for (name, curve), (colour, dash) in zip(curves.items(), styles, strict=False)
        ]
        if min(len(line.points) for line in lines) < 2:
            continue
        drawing, _ = line_chart(lines, "step", f"held-out loss of {cut(model, 24)}", columns=2)
        since = f"step {here[0][0]:,} on"
        found.append(Picture(svg(drawing), f"{model}: held-out loss against the labels, {since}: {_ends(lines)}."))
    return found


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
    left_out = f" The first {len(lines)} of {len(names)} metrics." if len(lines) < len(names) else ""
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
        value, found = settings.get(key), [run.metrics[metric] for run in runs if metric in run.metrics]
        if isinstance(value, str) or value is None or not found:
            return None
        points.append((value, *spread(found)))
    points.sort()
    places, means = [value for value, *_ in points], [mean for _, mean, _ in points]
    line = Line("", list(zip(places, means, strict=True)), COLOURS[0])
    drawing, axes = line_chart([line], cut(key, 40), cut(f"{metric} on {report.selection.on}", 40))
    spreads = [deviation or 0.0 for *_, deviation in points]
    axes.errorbar(places, means, yerr=spreads, fmt="none", ecolor=COLOURS[0], elinewidth=1.2, capsize=4)
    ticks(axes, places, log=places[0] > 0 and places[-1] / places[0] >= 8)
    words = "; ".join(f"{x:g} {number(y)}" + (f" ± {sd:.2g}" if sd is not None else "") for x, y, sd in points)
    return Picture(svg(drawing), f"{metric} over {key}, mean ± sample standard deviation over seeds: {words}.")
