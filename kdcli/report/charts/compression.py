"""Draw the candidates of a compression by quality, latency and size, with the Pareto front."""

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdcli.report.charts.charts import AT_P90, BEYOND, UNSTABLE_MARK
from kdcli.report.charts.drawing import (
    COLOURS,
    HEIGHT,
    INK,
    WIDTH,
    AxisRange,
    cost_range,
    figure,
    legend,
    mark_outlier,
    score_range,
    set_range,
    styled,
    svg,
)
from kdcli.report.pareto import candidates_on_front
from kdcli.report.schema import Candidate, CandidateCost, Compression
from kdcli.report.text import Picture, number

AXES: dict[CandidateCost, str] = {"ms": "median ms, 1 × 128 tokens", "mb": "files, MB"}
SHOWN: dict[CandidateCost, str] = {
    "ms": "Better is up and to the left: quality and latency.",
    "mb": "Better is up and to the left: quality and size.",
}
CANDIDATE_MARKERS = "os^Dv<>PX"


def compression_pictures(compression: Compression) -> list[Picture]:
    """Return quality over latency and quality over size."""
    return [_picture(compression, cost) for cost in _costs(compression)]


def png(compression: Compression) -> bytes:
    """Return both pictures next to each other on white, as PNG."""
    costs = _costs(compression)
    drawing = Figure(figsize=(len(costs) * WIDTH, HEIGHT + 0.6), layout="constrained")
    for axes, cost in zip(drawing.subplots(1, len(costs)), costs, strict=True):
        _draw(styled(drawing, axes), compression, cost, _ranges(compression, cost))
    legend(drawing, 4, _chosen_label(compression, "ms"))
    data = io.BytesIO()
    drawing.savefig(data, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return data.getvalue()


def _costs(compression: Compression) -> list[CandidateCost]:
    """Return the costs that the candidates were measured by."""
    return [*AXES, *_measured(compression)[0].costs]


def _axis(cost: CandidateCost) -> str:
    return AXES.get(cost, cost)


def _picture(compression: Compression, cost: CandidateCost) -> Picture:
    drawing, axes = figure(0.6)
    across, along = ranges = _ranges(compression, cost)
    front = _draw(axes, compression, cost, ranges)
    legend(drawing, 2, _chosen_label(compression, cost))
    words = "; ".join(
        f"{_label(one, cost)} {one.cost(cost):.3g}, {number(one.score)}"
        for one in _measured(compression)
    )
    caption = (
        f"{compression.metric} on {compression.task} over {_axis(cost)}, bars are 95 % intervals: "
        f"{words}. On the line, the Pareto front: {', '.join(front)}. Dashed: the goal."
    )
    remarks = ""
    if outside := [name for name in _names(compression) if name in across.outside | along.outside]:
        remarks += f" {BEYOND.format(', '.join(outside))}"
    if cost == "ms" and any(one.unstable for one in _measured(compression)):
        remarks += f" {AT_P90}"
    better = SHOWN.get(cost, f"Better is up and to the left: quality and {cost}.")
    shown = f"{better} Bars: 95 % intervals. Line: the Pareto front. Dashed: the goal."
    return Picture(svg(drawing), caption + remarks, shown + remarks)


def _measured(compression: Compression) -> list[Candidate]:
    return [one for one in compression.candidates if one.score is not None]


def _names(compression: Compression) -> list[str]:
    return [one.name for one in _measured(compression)]


def _label(one: Candidate, cost: CandidateCost) -> str:
    """Name a candidate in a picture."""
    return one.name + UNSTABLE_MARK * (cost == "ms" and one.unstable)


def _chosen_label(compression: Compression, cost: CandidateCost) -> str:
    chosen = next(one for one in compression.candidates if one.name == compression.chosen)
    return _label(chosen, cost)


def _draw(
    axes: Axes, compression: Compression, cost: CandidateCost, ranges: tuple[AxisRange, AxisRange]
) -> list[str]:
    """Draw the candidates, and return the names on the front.

    `ranges` are the ranges of cost and score.
    """
    measured = _measured(compression)
    points = {one.name: (one.cost(cost), float(one.score or 0.0)) for one in measured}
    front = candidates_on_front(measured, cost)
    across, along = ranges
    drawn = {name: (across.place(x), along.place(y)) for name, (x, y) in points.items()}
    axes.step(
        *zip(*(drawn[name] for name in front), strict=True),
        where="post",
        color=INK,
        linewidth=1,
        alpha=0.7,
    )
    for number_, one in enumerate(measured):
        (x, y), colour = drawn[one.name], COLOURS[number_ % len(COLOURS)]
        low, high = (y if end is None else along.place(end) for end in (one.low, one.high))
        axes.errorbar(
            [x],
            [y],
            yerr=[[max(0.0, y - low)], [max(0.0, high - y)]],
            ecolor=colour,
            elinewidth=1,
            capsize=3,
            linestyle="none",
            marker=CANDIDATE_MARKERS[number_ % len(CANDIDATE_MARKERS)],
            markersize=10 if one.name == compression.chosen else 6,
            markeredgecolor=colour,
            markerfacecolor=colour if one.name in front else "none",
            label=_label(one, cost),
            clip_on=False,
        )
        if one.name in across.outside | along.outside:
            mark_outlier(axes, points[one.name], across, along, one.name)
    if (lowest := _lowest_score(compression)) is not None:
        axes.axhline(lowest, color=INK, linewidth=1, linestyle="--")
    for limit in _lines(compression, cost):
        axes.axvline(limit, color=INK, linewidth=1, linestyle="--")
    quality = f"{compression.metric}, selection rows"
    axes.set(xlabel=_axis(cost), ylabel=quality, ylim=(along.low, along.high))
    set_range(axes, axes.xaxis, across)
    return front


def _ranges(compression: Compression, cost: CandidateCost) -> tuple[AxisRange, AxisRange]:
    """Return the ranges of cost and score, which one bad candidate does not stretch.

    The teacher and the chosen candidate are always inside.
    """
    measured = _measured(compression)
    kept = [measured[0].name, compression.chosen]
    costs = {one.name: one.cost(cost) for one in measured}
    scores = {one.name: float(one.score or 0.0) for one in measured}
    bars = {one.name: [end for end in (one.low, one.high) if end is not None] for one in measured}
    lowest = _lowest_score(compression)
    return (
        cost_range(costs, fixed=_lines(compression, cost), kept=kept),
        score_range(scores, fixed=[] if lowest is None else [lowest], kept=kept, bars=bars),
    )


def _lowest_score(compression: Compression) -> float | None:
    """Return the score that the goal allows; None if the goal does not limit it."""
    return next(iter(_lines(compression, "score")), None)


def _lines(compression: Compression, axis: str) -> list[float]:
    """Return the values that the goal allows on an axis."""
    limits = [limit.line for limit in compression.limits if limit.axis == axis]
    return [line for line in limits if line is not None]
