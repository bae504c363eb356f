"""Draw the candidates of a compression by quality, latency and size, with the Pareto front."""

import io
from dataclasses import dataclass
from functools import cached_property

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
    show_values,
    styled,
    svg,
)
from kdcli.report.pareto import candidates_on_front
from kdcli.report.schema import Candidate, CandidateCost, Compression
from kdcli.report.text import Picture, number

AXES: dict[CandidateCost, str] = {"ms": "median ms, 1 × 128 tokens", "mb": "files, MB"}
COSTS: dict[CandidateCost, str] = {"ms": "latency", "mb": "size"}
CANDIDATE_MARKERS = "os^Dv<>PX"


def compression_pictures(compression: Compression) -> list[Picture]:
    """Return quality over latency, over size, and over every other cost of the candidates."""
    return [chart.picture() for chart in _charts(compression)]


def png(compression: Compression) -> bytes:
    """Return all pictures next to each other on white, as PNG."""
    charts = _charts(compression)
    drawing = Figure(figsize=(len(charts) * WIDTH, HEIGHT + 0.6), layout="constrained")
    for axes, chart in zip(drawing.subplots(1, len(charts)), charts, strict=True):
        chart.draw(styled(drawing, axes))
    legend(drawing, 4, charts[0].labels[compression.chosen])
    data = io.BytesIO()
    drawing.savefig(data, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return data.getvalue()


def _charts(compression: Compression) -> "list[_Chart]":
    measured = [one for one in compression.candidates if one.score is not None]
    return [_Chart(compression, measured, cost) for cost in [*AXES, *measured[0].costs]]


@dataclass(frozen=True)
class _Chart:
    """The measured candidates of a compression, the teacher first, over one of their costs."""

    compression: Compression
    measured: list[Candidate]
    cost: CandidateCost

    @property
    def axis(self) -> str:
        return AXES.get(self.cost, self.cost)

    @property
    def labels(self) -> dict[str, str]:
        """The names of the candidates with a mark for unstable latencies."""
        is_latency = self.cost == "ms"
        return {
            one.name: one.name + UNSTABLE_MARK * (is_latency and one.unstable)
            for one in self.measured
        }

    @cached_property
    def points(self) -> dict[str, tuple[float, float]]:
        """The cost and the score of each candidate."""
        return {one.name: (one.cost(self.cost), one.score or 0.0) for one in self.measured}

    @cached_property
    def front(self) -> list[str]:
        """The names on the Pareto front."""
        return candidates_on_front(self.measured, self.cost)

    def limits(self, axis: str) -> list[float]:
        """Return the values that the goal allows on an axis."""
        lines = [limit.line for limit in self.compression.limits if limit.axis == axis]
        return [line for line in lines if line is not None]

    @cached_property
    def ranges(self) -> tuple[AxisRange, AxisRange]:
        """The ranges of cost and score, which one bad candidate does not stretch.

        The teacher and the chosen candidate are always inside.
        """
        kept = [self.measured[0].name, self.compression.chosen]
        costs, scores = ({n: point[i] for n, point in self.points.items()} for i in (0, 1))
        ends = {one.name: (one.low, one.high) for one in self.measured}
        bars = {n: [end for end in both if end is not None] for n, both in ends.items()}
        return (
            cost_range(costs, fixed=self.limits(self.cost), kept=kept),
            score_range(scores, fixed=self.limits("score")[:1], kept=kept, bars=bars),
        )

    def picture(self) -> Picture:
        compression, cost = self.compression, self.cost
        across, along = self.ranges
        drawing, axes = figure(0.6)
        self.draw(axes)
        legend(drawing, 2, self.labels[compression.chosen])
        words = "; ".join(
            f"{self.labels[name]} {value:.3g}, {number(score)}"
            for name, (value, score) in self.points.items()
        )
        caption = (
            f"{compression.metric} on {compression.task} over {self.axis}, bars are 95 % "
            f"intervals: {words}. On the line, the Pareto front: {', '.join(self.front)}."
        )
        has_goal = self.limits("score") or self.limits(cost)
        remarks = " Dashed: the goal." if has_goal else ""
        if outside := [name for name in self.points if name in across.outside | along.outside]:
            remarks += f" {BEYOND.format(', '.join(outside))}"
        if cost == "ms" and any(one.unstable for one in self.measured):
            remarks += f" {AT_P90}"
        shown = (
            f"Better is up and to the left: quality and {COSTS.get(cost, cost)}. Bars: 95 % "
            "intervals. Line: the Pareto front."
        )
        return Picture(svg(drawing), caption + remarks, shown + remarks)

    def draw(self, axes: Axes) -> None:
        """Draw the candidates."""
        across, along = self.ranges
        drawn = {n: (across.place(x), along.place(y)) for n, (x, y) in self.points.items()}
        joined = zip(*(drawn[name] for name in self.front), strict=True)
        axes.step(*joined, where="post", color=INK, linewidth=1, alpha=0.7)
        for place, one in enumerate(self.measured):
            (x, y), colour = drawn[one.name], COLOURS[place % len(COLOURS)]
            low, high = (y if end is None else along.place(end) for end in (one.low, one.high))
            drawn_point, *_ = axes.errorbar(
                [x],
                [y],
                yerr=[[max(0.0, y - low)], [max(0.0, high - y)]],
                ecolor=colour,
                elinewidth=1,
                capsize=3,
                linestyle="none",
                marker=CANDIDATE_MARKERS[place % len(CANDIDATE_MARKERS)],
                markersize=10 if one.name == self.compression.chosen else 6,
                markeredgecolor=colour,
                markerfacecolor=colour if one.name in self.front else "none",
                label=self.labels[one.name],
                clip_on=False,
            )
            cost, score = self.points[one.name]
            interval = "" if one.low is None else f" ({one.low:.4f} to {one.high:.4f})"
            exact = f"{self.compression.metric} {score:.4f}{interval}, {self.axis} {cost:,.4g}"
            show_values(drawn_point, [f"{self.labels[one.name]}: {exact}"])
            if one.name in across.outside | along.outside:
                mark_outlier(axes, self.points[one.name], across, along, one.name)
        for limit in self.limits("score")[:1]:
            axes.axhline(limit, color=INK, linewidth=1, linestyle="--")
        for limit in self.limits(self.cost):
            axes.axvline(limit, color=INK, linewidth=1, linestyle="--")
        quality = f"{self.compression.metric}, selection rows"
        axes.set(xlabel=self.axis, ylabel=quality, ylim=(along.low, along.high))
        set_range(axes, axes.xaxis, across)
