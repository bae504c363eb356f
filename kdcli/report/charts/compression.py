"""Draw the candidates of a compression by quality, latency and size, with the Pareto front."""

import io
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdcli.report.charts.charts import AT_QUARTILE, UNSTABLE_MARK
from kdcli.report.charts.drawing import (
    COLOURS,
    HEIGHT,
    INK,
    WIDTH,
    figure,
    legend,
    plain_logarithm,
    styled,
    svg,
)
from kdcli.report.pareto import front_of
from kdcli.report.schema import Candidate, Compression
from kdcli.report.text import Picture, number

CandidateCost = Literal["ms", "mb"]
AXES: dict[CandidateCost, str] = {"ms": "median ms, 1 × 128 tokens", "mb": "files, MB"}
CANDIDATE_MARKERS = "os^Dv<>PX"


def compression_pictures(compression: Compression) -> list[Picture]:
    """Return quality over latency and quality over size."""
    return [_picture(compression, cost) for cost in AXES]


def png(compression: Compression) -> bytes:
    """Return both pictures next to each other on white, as PNG."""
    drawing = Figure(figsize=(2 * WIDTH, HEIGHT + 0.6), layout="constrained")
    for axes, cost in zip(drawing.subplots(1, 2), AXES, strict=True):
        _draw(styled(drawing, axes), compression, cost)
    legend(drawing, 4, _chosen_label(compression, "ms"))
    data = io.BytesIO()
    drawing.savefig(data, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return data.getvalue()


def _picture(compression: Compression, cost: CandidateCost) -> Picture:
    drawing, axes = figure(0.6)
    front = _draw(axes, compression, cost)
    legend(drawing, 2, _chosen_label(compression, cost))
    words = "; ".join(
        f"{_label(one, cost)} {_cost(one, cost):.3g}, {number(one.score)}"
        for one in _measured(compression)
    )
    caption = (
        f"{compression.metric} on {compression.task} over {AXES[cost]}, bars are 95 % intervals: "
        f"{words}. On the line, the Pareto front: {', '.join(front)}. Dashed: the goal."
    )
    if cost == "ms" and any(one.unstable for one in _measured(compression)):
        caption += f" {AT_QUARTILE}"
    return Picture(svg(drawing), caption)


def _measured(compression: Compression) -> list[Candidate]:
    return [one for one in compression.candidates if one.score is not None]


def _label(one: Candidate, cost: CandidateCost) -> str:
    """Name a candidate in a picture."""
    return one.name + UNSTABLE_MARK * (cost == "ms" and one.unstable)


def _chosen_label(compression: Compression, cost: CandidateCost) -> str:
    chosen = next(one for one in compression.candidates if one.name == compression.chosen)
    return _label(chosen, cost)


def _cost(one: Candidate, cost: CandidateCost) -> float:
    return float(getattr(one, cost))


def _draw(axes: Axes, compression: Compression, cost: CandidateCost) -> list[str]:
    """Draw the candidates, and return the names on the front."""
    measured, goal = _measured(compression), compression.goal
    points = {one.name: (_cost(one, cost), float(one.score or 0.0)) for one in measured}
    front = front_of(points)
    axes.step(
        *zip(*(points[name] for name in front), strict=True),
        where="post",
        color=INK,
        linewidth=1,
        alpha=0.7,
    )
    for number_, one in enumerate(measured):
        (x, y), colour = points[one.name], COLOURS[number_ % len(COLOURS)]
        low, high = (y if end is None else end for end in (one.low, one.high))
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
        )
    teacher = measured[0]
    if "max_drop" in goal:
        axes.axhline(
            points[teacher.name][1] - 0.01 * goal["max_drop"],
            color=INK,
            linewidth=1,
            linestyle="--",
        )
    limits = [goal["max_mb"]] if cost == "mb" and "max_mb" in goal else []
    if cost == "ms":
        limits += [goal["max_latency_ms"]] if "max_latency_ms" in goal else []
        # The worse quartile of the teacher's time would place the limit too far to the right.
        if "speedup" in goal and not teacher.unstable:
            limits.append(points[teacher.name][0] / goal["speedup"])
    for limit in limits:
        axes.axvline(limit, color=INK, linewidth=1, linestyle="--")
    axes.set(xlabel=AXES[cost], ylabel=compression.metric)
    places = [x for x, _ in points.values()]
    if max(places) > 8 * min(places):
        axes.set(xscale="log", xlim=(min(places) / 1.5, 1.5 * max(places)))
        plain_logarithm(axes.xaxis, (1, 2, 5))
    else:
        axes.set_xlim(left=0)
    return front
