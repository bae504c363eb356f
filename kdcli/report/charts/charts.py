"""Draw the pictures of a report: training, settings, latency, size and quality."""

import itertools
from collections.abc import Callable, Collection
from typing import Literal

from kdcli.deploy.measurements import LatencyRow
from kdcli.metrics.bootstrap import range_of
from kdcli.report.charts.drawing import (
    COLOURS,
    DASHES,
    INK,
    MARKERS,
    Line,
    line_chart,
    scatter_chart,
    svg,
    ticks,
)
from kdcli.report.pareto import front_of
from kdcli.report.schema import CurvePoint, Report
from kdcli.report.sections.evaluations import set_name
from kdcli.report.sections.grid import by_setting, spread
from kdcli.report.sections.timings import (
    PLAIN,
    Cell,
    cell_name,
    cells,
    comparable,
    first_cell,
    form_of,
    ran_as,
)
from kdcli.report.text import (
    LOWER_IS_BETTER,
    Picture,
    names_in,
    number,
    shortened_line,
    without_owner,
)

HARD = "hard"  # the held-out loss against the labels, of models that are trained together
HELD_PREFIX = "held-out "  # prefix of the labels of held-out losses
TOGETHER = "together"  # the line of this run, next to the lines of the compared runs
MAX_LINES = 12  # in one picture
MAX_TERMS = 9  # with more held-out terms, a picture has a line for each student
UNSTABLE_MARK = " (unstable)"  # after a name in a picture
BEYOND = "At the edge, since the rest would be too close together: {}."
AT_P90 = "Unstable measurements are drawn at their 90th percentile, not at their median."

Cost = Literal["latency", "size"]


def report_pictures(report: Report) -> list[Picture]:
    """Return the pictures that the report has numbers for.

    The pictures of a pruned model are shown with its numbers.
    """
    drawn = [
        *_compared_curves(report),
        *_growth(report),
        _loss_curve(report),
        _metric_curve(report),
        _setting_curve(report),
    ]
    if report.focus == "latency":
        drawn += [quality_against(report, "latency"), quality_against(report, "size")]
        drawn += [latency_over(report, "tokens"), latency_over(report, "batch size")]
    if len(report.pruning) > 1:
        drawn += [_score_over_density(report), quality_against(report, "size")]
    return [p for p in drawn if p is not None]


def _ends(lines: list[Line], write: Callable[[float], str] = number) -> str:
    """Write the first and the last value of every line."""
    return ", ".join(
        f"{line.label} {write(line.points[0][1])} → {write(line.points[-1][1])}" for line in lines
    )


def _loss_curve(report: Report) -> Picture | None:
    """Draw the training loss and the held-out terms over the steps, on a logarithmic axis.

    Each of several models has a colour, and its terms differ in their dashes. The terms of a single
    model differ in their colours.
    """
    training = [(p.step, p.loss) for p in report.curve if p.loss is not None]
    if len(training) < 2:
        return None
    held = [(p.step, p.held_out) for p in report.curve if p.held_out]
    lines = _held_out_lines(held) if held else []
    several = len(lines) > 0 and len(held[0][1]) > 1
    label = "training, all of them" if several else "training"
    total = Line(label, training, INK, marker="", width=0.9)
    columns = 3 if len(lines) < 3 else 2
    drawing, _ = line_chart([total, *lines], "step", columns=columns, log=True)
    caption = f"Loss over {report.curve[-1].step:,} steps"
    if lines:
        # The caption says once that these are held-out losses.
        unprefixed = [Line(line.label.removeprefix(HELD_PREFIX), line.points, "") for line in lines]
        caption += f"; on held-out data, never trained on: {_ends(unprefixed)}"
    return Picture(svg(drawing), f"{caption}.")


def _held_out_lines(held: list[tuple[int, dict[str, dict[str, float]]]]) -> list[Line]:
    """Return a line for each term of each model or, of too many terms, for each model."""
    models = list(held[0][1])
    # The total of a model is shown if it has no terms.
    terms = {
        model: [term for term in losses if term != "loss"] or list(losses)
        for model, losses in held[0][1].items()
    }
    several = len(models) > 1
    summed = sum(map(len, terms.values())) > MAX_TERMS
    kinds = list(dict.fromkeys(term for model in models for term in terms[model]))
    lines = []
    for place, model in enumerate(models):
        for parts in [terms[model]] if summed else [[term] for term in terms[model]]:
            kind = place // len(COLOURS) if summed else kinds.index(parts[0])
            label = model if summed else f"{model}/{parts[0]}" if several else parts[0]
            colour = COLOURS[(place if several or summed else kind) % len(COLOURS)]
            dash = DASHES[kind % len(DASHES)] if several else "-"
            points = [
                (step, sum(at[model][term] for term in parts))
                for step, at in held
                if at.get(model, {}).keys() >= {*parts}
            ]
            lines.append(Line(f"{HELD_PREFIX}{label}", points, colour, dash))
    return lines


def _compared_curves(report: Report) -> list[Picture]:
    """Draw each model's held-out loss against the labels, here and in the compared runs.

    The start is skipped: all runs share it, and it would hide the differences.
    """
    curves = {TOGETHER: report.curve, **report.compared_runs}
    here = _after_start(report.curve)
    if not here or not report.compared_runs:
        return []
    drawn = []
    for model in [name for name, terms in here[0][1].items() if HARD in terms]:
        styles = zip(COLOURS, itertools.cycle(DASHES), strict=False)
        lines = []
        for (name, curve), (colour, dash) in zip(curves.items(), styles, strict=False):
            points = [
                (s, at[model][HARD]) for s, at in _after_start(curve) if HARD in at.get(model, {})
            ]
            lines.append(Line(name, points, colour, dash))
        if min(len(line.points) for line in lines) < 2:
            continue
        drawing, _ = line_chart(
            lines, "step", f"held-out loss of {shortened_line(model, 24)}", columns=2
        )
        # Runs from one start differ in the fourth decimal.
        ends = _ends(lines, "{:.4f}".format)
        caption = f"{model}: held-out loss against the labels, from step {here[0][0]:,} on: {ends}."
        drawn.append(Picture(svg(drawing), caption))
    return drawn


def _after_start(curve: list[CurvePoint]) -> list[tuple[int, dict[str, dict[str, float]]]]:
    """Return the held-out losses after step 0."""
    return [(p.step, p.held_out) for p in curve if p.held_out and p.step]


def _growth(report: Report) -> list[Picture]:
    """Draw the quality of every student over its tokens; dashed lines are the undistilled ones."""
    checkpoints: dict[str, list[tuple[int, str]]] = {}
    for model in report.with_role("checkpoint"):
        if model.of is not None and model.step is not None:
            checkpoints.setdefault(model.of, []).append((model.step, model.name))
    if report.training is None or not checkpoints:
        return []
    tokens_per_step = report.training.tokens / max(1, report.training.steps)
    end = report.training.tokens / 1e6
    untrained = [model.name for model in report.with_role("untrained")]
    drawn = []
    for task, by_model in report.quality.items():
        metric = next(iter(next(iter(by_model.values()), {})), "")
        lines: list[Line] = []
        for name, colour in zip(checkpoints, itertools.cycle(COLOURS), strict=False):
            points = [
                (step * tokens_per_step / 1e6, by_model[at][metric])
                for step, at in sorted(checkpoints[name])
                if at in by_model
            ]
            if points:
                points.append((end, by_model[name][metric]))
                marker = MARKERS[len(lines) // len(COLOURS) % len(MARKERS)]
                lines.append(Line(name, points, colour, marker=marker))
        if not lines:
            continue
        start = min(line.points[0][0] for line in lines)
        for name in [name for name in by_model if name in untrained]:
            value = by_model[name][metric]
            lines.append(Line(name, [(start, value), (end, value)], INK, "--", marker=""))
        along = shortened_line(f"{metric} on {task}", 40)
        bounds = range_of(metric)
        drawing, axes = line_chart(lines, "million tokens", along, columns=2, bounds=bounds)
        ticks(axes, sorted({x for line in lines for x, _ in line.points}), log=start * 8 <= end)
        caption = f"{metric} on {task} over the tokens distilled on: {_ends(lines)}."
        drawn.append(Picture(svg(drawing), caption))
    return drawn


def _metric_curve(report: Report) -> Picture | None:
    """Draw a task's metrics on the validation set over the steps, if there are two of them."""
    points = [(p.step, p.metrics) for p in report.curve if p.metrics]
    if len(points) < 2:
        return None
    names = names_in(metrics for _, metrics in points)
    lines = [
        Line(name, [(step, metrics[name]) for step, metrics in points if name in metrics], colour)
        for colour, name in zip(COLOURS, names, strict=False)
    ]
    columns = 3 if len(lines) <= 3 else 2
    drawing, _ = line_chart(lines, "step", columns=columns, bounds=range_of(names[0]))
    caption = f"On the validation set while training: {_ends(lines)}."
    if len(lines) < len(names):
        caption += f" The first {len(lines)} of {len(names)} metrics."
    return Picture(svg(drawing), caption)


def _setting_curve(report: Report) -> Picture | None:
    """Draw the metric of the choice over the one numeric setting that differs, if there is one."""
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
        value = settings.get(key)
        values = [run.metrics[metric] for run in runs if metric in run.metrics]
        if isinstance(value, str) or value is None or not values:
            return None
        points.append((value, *spread(values)))
    points.sort()
    places, means, deviations = zip(*points, strict=True)
    bars = [deviation or 0.0 for deviation in deviations]
    line = Line("", list(zip(places, means, strict=True)), COLOURS[0], bars=bars)
    along = shortened_line(f"{metric} on {report.selection.on}", 40)
    drawing, axes = line_chart([line], shortened_line(key, 40), along, bounds=range_of(metric))
    ticks(axes, places, log=places[0] > 0 and places[-1] / places[0] >= 8)
    words = "; ".join(
        f"{x:g} {number(y)}" + (f" ± {sd:.2g}" if sd is not None else "") for x, y, sd in points
    )
    caption = f"{metric} over {key}, mean ± sample standard deviation over seeds: {words}."
    return Picture(svg(drawing), caption)


def _with_remark(caption: str, unstable: Collection[str]) -> str:
    """Add to a caption where unstable measurements are drawn, if there are any."""
    return f"{caption} {AT_P90}" if unstable else caption


def latency_over(report: Report, what: Literal["tokens", "batch size"]) -> Picture | None:
    """Draw medians over tokens or over the batch size, both axes logarithmic.

    Each model has a colour, and each backend a kind of dashes. Of the cells that differ in nothing
    else, the largest group is drawn; it needs two cells.
    """
    varies = 1 if what == "tokens" else 0
    by_cell = cells(report)
    groups: dict[int, list[Cell]] = {}
    for cell in by_cell:
        groups.setdefault(cell[1 - varies], []).append(cell)
    chosen: list[Cell] = max(map(sorted, groups.values()), key=len, default=[])
    if len(chosen) < 2:
        return None
    rows: dict[tuple[str, tuple[str, str]], dict[int, LatencyRow]] = {}
    for cell in chosen:
        for row in by_cell[cell]:
            rows.setdefault((row.model, (row.backend, row.dtype)), {})[cell[varies]] = row
    models, backends = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    lines: list[Line] = []
    unstable: list[str] = []
    for (model, on), by_place in list(rows.items())[:MAX_LINES]:
        turn, place = divmod(models.index(model), len(COLOURS))
        name = model if len(backends) == 1 else ran_as(next(iter(by_place.values())))
        points = [(x, row.stated_ms) for x, row in by_place.items()]
        if any(row.unstable for row in by_place.values()):
            name += UNSTABLE_MARK
            unstable.append(name)
        dash, marker = DASHES[backends.index(on) % len(DASHES)], MARKERS[turn % len(MARKERS)]
        lines.append(Line(name, points, COLOURS[place], dash, marker))
    columns = 3 if len(backends) == 1 else 2
    taller = 0.17 * max(0, -(-len(lines) // columns) - 2)
    fixed = f"batch size {chosen[0][0]}" if what == "tokens" else f"{chosen[0][1]} tokens"
    across = f"{what}, with {fixed}"
    drawing, axes = line_chart(lines, across, "median ms", columns=columns, log=True, taller=taller)
    ticks(axes, [cell[varies] for cell in chosen], log=True)
    words = "; ".join(
        f"{line.label} " + ", ".join(f"{ms:.3g} ({x})" for x, ms in line.points) for line in lines
    )
    caption = f"Median milliseconds by {what}, {fixed}, both axes logarithmic: {words}."
    if len(lines) < len(rows):
        caption += f" The first {len(lines)} of {len(rows)} lines."
    return Picture(svg(drawing), _with_remark(caption, unstable))


def quality_against(report: Report, what: Cost) -> Picture | None:
    """Draw a task's metric against latency in the first cell, or against size.

    A line joins the models that no other model beats in both; the others are hollow. There is no
    picture without two models that were scored and measured.
    """
    timed = _timed(report)
    rows, backends = list(timed.values()), {(row.backend, row.dtype) for row in timed.values()}
    if what == "latency":
        unit, label = "ms", "median ms"
        costs = {name: row.stated_ms for name, row in timed.items()}
        if rows:
            label += f", {cell_name(rows[0].cell)}"
        if len(backends) == 1:
            label += f", {rows[0].backend} {rows[0].dtype}"
    else:
        unit, label, costs = "MB", "weights, MB", _sizes(report)
    task, metric, quality = _most_scored(report, list(costs))
    if len(quality) < 2:
        return None
    points = {name: (costs[name], value) for name, value in quality.items()}
    front = front_of(points)
    unstable = [name for name in points if what == "latency" and timed[name].unstable]
    marks = {name: UNSTABLE_MARK * (name in unstable) for name in points}
    labels = {name: shortened_line(without_owner(name), 24) + marks[name] for name in points}
    along = shortened_line(f"{metric} on {task}", 40)
    drawing = scatter_chart(points, labels, label, along, front, range_of(metric))
    words = "; ".join(
        f"{name} {cost:.4g} {unit}{marks[name]}, {number(value)}"
        for name, (cost, value) in points.items()
    )
    text = f"{metric} on {task} against {what} ({label}): {words}. On the line: {', '.join(front)}."
    if beaten := [name for name in points if name not in front]:
        text += f" Hollow, since another is at least as good in both: {', '.join(beaten)}."
    if what == "latency" and len(backends) == 1 and backends.isdisjoint(PLAIN):
        text += " The quality belongs to the weights, not to this backend."
    return Picture(drawing, _with_remark(text, unstable))


def _timed(report: Report) -> dict[str, LatencyRow]:
    """Return rows of the first cell by the model or form whose scores belong to them.

    They are the comparable rows of all models, unless other rows were scored too.
    """
    scored = {name for models in report.quality.values() for name in models}
    usual = comparable(report)
    forms: dict[str, LatencyRow] = {}
    for row in first_cell(report):
        name = form_of(report, row).name
        if name in scored:
            forms.setdefault(name, row)
    if forms.keys() - {row.model for row in usual}:
        return forms
    return {row.model: row for row in usual if row.model in report.cards}


def _score_over_density(report: Report) -> Picture | None:
    """Draw a task's metric over the share of the weights that is kept.

    Each variant or method has a line, with error bars over seeds. There is no picture if all models
    keep the same share.
    """
    kept = {p.model: 100 * p.density for p in report.pruning}
    task, metric, quality = _most_scored(report, list(kept))
    places = sorted({float(f"{kept[model]:.2g}") for model in quality})
    if len(places) < 2:
        return None
    bars = {
        e.model: e.deviations.get(metric, 0.0)
        for e in report.evaluations
        if set_name(e.task, e.set) == task
    }
    curves: dict[str, list[str]] = {}
    for p in report.pruning:
        if p.model in quality:
            name = p.model.removesuffix(f"{100 * p.sparsity:g} %").strip() or p.method
            curves.setdefault(name, []).append(p.model)
    lines: list[Line] = []
    for (name, models), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
        models.sort(key=kept.__getitem__)
        points = [(kept[model], quality[model]) for model in models]
        marker = MARKERS[len(lines) // len(COLOURS) % len(MARKERS)]
        own = [bars.get(model, 0.0) for model in models]
        lines.append(Line(name, points, colour, marker=marker, bars=own))
    words = "; ".join(
        f"{line.label} " + ", ".join(f"{number(y)} ({x:.3g} %)" for x, y in line.points)
        for line in lines
    )
    caption = f"{metric} on {task} over the weights kept: {words}."
    if any(bar for line in lines for bar in line.bars):
        caption += " Means over seeds; bars: sample standard deviation."
    along = shortened_line(f"{metric} on {task}", 40)
    drawing, axes = line_chart(lines, "weights kept, %", along, columns=3, bounds=range_of(metric))
    ticks(axes, places, log=0 < 8 * places[0] <= places[-1])
    return Picture(svg(drawing), caption)


def _sizes(report: Report) -> dict[str, float]:
    """Return the MB of the pruned or measured models; empty if pruned models do not differ."""
    measured = [p.model for p in report.pruning] or [row.model for row in first_cell(report)]
    sizes = {name: card.bytes / 1e6 for name, card in report.cards.items() if name in measured}
    same = report.pruning and len(set(sizes.values())) == 1
    return {} if same else sizes


def _most_scored(report: Report, models: list[str]) -> tuple[str, str, dict[str, float]]:
    """Return the task and metric that most of the models have, and their values.

    Metrics that are better when lower are skipped.
    """
    candidates = [
        (task, metric, {m: values[m][metric] for m in models if metric in values.get(m, {})})
        for task, values in report.quality.items()
        for metric in names_in(values.values())
        if metric not in LOWER_IS_BETTER
    ]
    return max(candidates, key=lambda one: len(one[2]), default=("", "", {}))
