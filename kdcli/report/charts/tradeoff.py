"""Draw the candidates of a compression by quality, latency and size, with the Pareto front."""

import io
from dataclasses import dataclass
from functools import cached_property

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdcli.metrics.bootstrap import range_of
from kdcli.report.charts.charts import AT_P90, BEYOND, UNSTABLE_MARK
from kdcli.report.charts.drawing import (
    HEIGHT,
    INK,
    WIDTH,
    Scatter,
    bounds_of,
    cost_range,
    figure,
    legend,
    score_range,
    styled,
    svg,
)
from kdcli.report.pareto import candidates_on_front
from kdcli.report.schema import Candidate, CandidateCost, Compression
from kdcli.report.text import Picture, number

AXES: dict[CandidateCost, str] = {"ms": "median ms, 1 × 128 tokens", "mb": "files, MB"}
COSTS: dict[CandidateCost, str] = {"ms": "latency", "mb": "size"}


def compression_pictures(compression: Compression) -> list[Picture]:
    """Return quality over latency, over size, and over every other cost of the candidates."""
    return [chart.picture() for chart in _charts(compression)]


def png(compression: Compression) -> bytes:
    """Return all pictures next to each other on white, as PNG."""
    charts = _charts(compression)
    drawing = Figure(figsize=(len(charts) * WIDTH, HEIGHT + 0.6), layout="constrained")
    for axes, chart in zip(drawing.subplots(1, len(charts)), charts, strict=True):
        chart.draw(styled(drawing, axes))
    legend(drawing, 4, charts[0].scatter.labels[compression.chosen])
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

    def limits(self, axis: str) -> list[float]:
        """Return the values of the goal on an axis."""
        lines = [limit.line for limit in self.compression.limits if limit.axis == axis]
        return [line for line in lines if line is not None]

    @cached_property
    def scatter(self) -> Scatter:
        """The candidates, with the teacher, the chosen one and the goal on the axes."""
        compression, cost = self.compression, self.cost
        kept = [self.measured[0].name, compression.chosen]
        costs = {one.name: one.cost(cost) for one in self.measured}
        scores = {one.name: one.score or 0.0 for one in self.measured}
        lowest, highest = bounds_of(scores.values(), range_of(compression.metric))
        # The interval of a difference to the teacher may reach beyond the best possible score.
        ends = {
            one.name: (max(one.low, lowest), min(one.high, highest))
            for one in self.measured
            if one.low is not None and one.high is not None
        }
        return Scatter(
            points={name: (costs[name], scores[name]) for name in costs},
            labels={
                one.name: one.name + UNSTABLE_MARK * (cost == "ms" and one.unstable)
                for one in self.measured
            },
            cost=AXES.get(cost, cost),
            score=f"{compression.metric}, selection rows",
            across=cost_range(costs, fixed=self.limits(cost), kept=kept),
            along=score_range(
                scores,
                fixed=self.limits("score")[:1],
                kept=kept,
                bars=ends,
                bounds=(lowest, highest),
            ),
            front=candidates_on_front(self.measured, cost),
            ends=ends,
            chosen=compression.chosen,
        )

    def picture(self) -> Picture:
        compression, cost, scatter = self.compression, self.cost, self.scatter
        drawing, axes = figure(0.6)
        self.draw(axes)
        legend(drawing, 2, scatter.labels[compression.chosen])
        words = "; ".join(
            f"{scatter.labels[name]} {value:.3g}, {number(score)}"
            for name, (value, score) in scatter.points.items()
        )
        caption = (
            f"{compression.metric} on {compression.task} over {scatter.cost}, bars are 95 % "
            f"intervals: {words}. On the line, the Pareto front: {', '.join(scatter.front)}."
        )
        has_goal = self.limits("score") or self.limits(cost)
        remarks = " Dashed: the goal." if has_goal else ""
        if scatter.points.keys() - set(scatter.front):
            remarks += " Hollow: another is at least as good in both."
        if scatter.outside:
            remarks += f" {BEYOND.format(', '.join(scatter.outside))}"
        if cost == "ms" and any(one.unstable for one in self.measured):
            remarks += f" {AT_P90}"
        shown = (
            f"Better is up and to the left: quality and {COSTS.get(cost, cost)}. Bars: 95 % "
            "intervals. Line: the Pareto front."
        )
        return Picture(svg(drawing), caption + remarks, shown + remarks)

    def draw(self, axes: Axes) -> None:
        """Draw the candidates and the goal."""
        self.scatter.draw(axes)
        for limit in self.limits("score")[:1]:
            axes.axhline(limit, color=INK, linewidth=1, linestyle="--")
        for limit in self.limits(self.cost):
            axes.axvline(limit, color=INK, linewidth=1, linestyle="--")
