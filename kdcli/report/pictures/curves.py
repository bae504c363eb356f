"""The pictures of a report, and what they show in words: losses, metrics and settings; latency is drawn elsewhere."""

from __future__ import annotations

import itertools

from matplotlib.ticker import MaxNLocator, NullLocator

from kdcli.report.pictures.drawing import COLOURS, DASHES, INK, Picture, figure, legend, logarithmic, svg
from kdcli.report.pictures.latency import over, quality_against, size_latency
from kdcli.report.schema import Report
from kdcli.report.sections.latency import BENCHMARK
from kdcli.report.sections.selection import by_setting, spread
from kdcli.report.text import cut, names_of

HARD, TOGETHER = "/hard", "together"
"""The held-out term of a model that is trained with another, and what its line is called where it has one beside it."""


def pictures(report: Report) -> list[Picture]:
    """Those that the report has numbers for."""
    found = [*_beside_curves(report), _loss_curve(report), _metric_curve(report), _setting_curve(report)]
    if report.command == BENCHMARK:
        found += [quality_against(report, "latency"), quality_against(report, "size")]
        found += [over(report, "tokens"), over(report, "batch size")]
    if len(report.pruning) > 1:
        found += [quality_against(report, "density"), quality_against(report, "size")]
    found.append(size_latency(report))
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
    drawing, axes = figure()
    axes.plot(
        *zip(*training, strict=True),
        color=INK,
        linewidth=0.9,
        label="training" if len(students) < 2 else "training, all of them",
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
    logarithmic(axes, [v for _, v in training] + [of[n] for _, of in held for n in names])
    legend(drawing, 3 if len(names) < 3 else 2)
    ends = ", ".join(f"{n} {held[0][1][n]:.3g} → {held[-1][1][n]:.3g}" for n in names)
    steps = f"Loss over {report.curve[-1].step:,} steps"
    return Picture(svg(drawing), f"{steps}; on what is held out, never trained on: {ends}." if ends else f"{steps}.")


def _beside_curves(report: Report) -> list[Picture]:
    """Of each model the held-out loss against the labels, beside that of the same model in the runs that this one is
    compared with; none where there are no such runs. The start, from which all come, would hide what differs."""
    here = [(p.step, p.held_out) for p in report.curve if p.held_out and p.step]
    others = {
        name: [(p.step, p.held_out) for p in curve if p.held_out and p.step] for name, curve in report.beside.items()
    }
    found = []
    for term in [name for name in (here[0][1] if here and others else {}) if name.endswith(HARD)]:
        model = term.removesuffix(HARD)
        lines = {
            name: [(step, of[term]) for step, of in points if term in of]
            for name, points in {TOGETHER: here, **others}.items()
        }
        if min(len(points) for points in lines.values()) < 2:
            continue
        drawing, axes = figure()
        for (name, points), colour, dash in zip(lines.items(), COLOURS, itertools.cycle(DASHES), strict=False):
            label = cut(f"{model} {name}", 32)
            style = {"color": colour, "linestyle": dash, "linewidth": 1.6, "marker": "o", "markersize": 2.5}
            axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set_xlabel("step")
        axes.set_ylabel("held-out loss")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        legend(drawing, 2)
        ends = ", ".join(f"{name} {points[0][1]:.4f} → {points[-1][1]:.4f}" for name, points in lines.items())
        since = f"step {here[0][0]:,} on"
        found.append(Picture(svg(drawing), f"{model}: held-out loss against the labels, {since}: {ends}."))
    return found


def _metric_curve(report: Report) -> Picture | None:
    """Metrics of a task on the validation set over steps; None when they were taken less than twice."""
    points = [(p.step, p.metrics) for p in report.curve if p.metrics]
    if len(points) < 2:
        return None
    names = names_of(metrics for _, metrics in points)
    shown = names[: len(COLOURS)]
    drawing, axes = figure()
    ends = []
    for colour, name in zip(COLOURS, shown, strict=False):
        own = [(step, metrics[name]) for step, metrics in points if name in metrics]
        axes.plot(*zip(*own, strict=True), color=colour, linewidth=1.6, marker="o", markersize=3, label=cut(name, 24))
        ends.append(f"{name} {own[0][1]:.4g} → {own[-1][1]:.4g}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend(drawing, 3 if len(shown) <= 3 else 2)
    left_out = f" The first {len(shown)} of {len(names)} metrics." if len(shown) < len(names) else ""
    return Picture(svg(drawing), f"On the validation set while training: {', '.join(ends)}.{left_out}")


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
    drawing, axes = figure()
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
    return Picture(svg(drawing), f"{metric} over {key}, mean ± sample standard deviation over seeds: {said}.")
