"""Draw pictures in the style of the reports, as SVG without scripts or font files.

A mouse over a point shows the point's values, which are a `<title>` in the SVG.
"""

import html
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, unquote

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from kdcli.report.text import percent, shortened_line

# Readable on a white and on a black page.
COLOURS = ["#2f74ff", "#e07b00", "#12966b", "#a855f7", "#e0365c", "#0a95b8"]
DASHES = ["-", "--", ":", "-."]
MARKERS = "os^Dv<>PX"
# The page's text colour replaces it, so that one picture serves a light and a dark page.
INK = "#778899"
# Inches. The pictures are narrow, so that their labels stay readable on a telephone.
WIDTH, HEIGHT = 4.8, 3.2
MARGIN = 0.08  # a point at the end of an axis lies half outside the axes
# It becomes darker, so that it can be read without colour, but stays light below dark numbers.
SCALE = LinearSegmentedColormap.from_list("kept", ["#fff6d5", "#c4e4c1", "#6fbcca", "#4f93d6"])
NUMBERS = "#16202c"  # colour of the numbers on SCALE
MAX_NUMBERS = 16  # columns of a map whose cells have room for a number
ROW = 0.235  # height of a row of a map, in inches

OUTLIER = 5.0
"""A point is an outlier if the axis is more than this many times longer with it."""
WIDE = 8.0
"""A latency or size axis is logarithmic if its ends differ by more than this factor."""

UNBOUNDED = (-math.inf, math.inf)

VALUES = "values:"
"""Prefix of the ids of artists that have values for the mouse. The values follow it."""

Cells = Sequence[Sequence[float | None]]
"""Shares, row by row. Rows may differ in length, and None leaves a gap."""


@dataclass(frozen=True)
class Line:
    """A line of a chart, its points in order. `bars` are the half lengths of their error bars."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    dash: str = "-"
    marker: str = "o"
    width: float = 1.6
    bars: Sequence[float] = ()


@dataclass(frozen=True)
class AxisRange:
    """The range of an axis, and the points that are drawn at its edge because they lie outside.

    Attributes:
        low, high: The ends of the axis.
        log: Whether the axis is logarithmic.
        outside: The names of the outliers.
    """

    low: float
    high: float
    log: bool
    outside: frozenset[str]

    @classmethod
    def over(
        cls, values: Mapping[str, float], low: float, high: float, *, log: bool = False
    ) -> Self:
        """Return a range with the names of the values that lie outside it."""
        beyond = {name for name, value in values.items() if not low <= value <= high}
        return cls(low, high, log, frozenset(beyond))

    def place(self, value: float) -> float:
        """Return where a value is drawn: itself, or the end of the axis that it lies beyond."""
        return min(max(value, self.low), self.high)

    def label(self, value: float, *, vertical: bool) -> str:
        """Return the label of an outlier: its value, with an arrow to where it is."""
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        if value > self.high:
            return f"{text} {'↑' if vertical else '→'}"
        return f"{'↓' if vertical else '←'} {text}"


def outliers(
    values: Mapping[str, float], *, fixed: Sequence[float] = (), kept: Collection[str] = ()
) -> frozenset[str]:
    """Return the names of the few extreme values without which the rest would spread out.

    At most a third of the values are outliers.

    Args:
        values: The values by name, on the scale of the axis.
        fixed: Other values that the axis shows in any case.
        kept: The names that are never outliers.
    """
    inside = dict(values)
    found: set[str] = set()
    while len(found) < len(values) // 3:
        lengths = {}
        ends = {min(inside, key=inside.__getitem__), max(inside, key=inside.__getitem__)}
        for name in ends.difference(kept):
            rest = [*(value for other, value in inside.items() if other != name), *fixed]
            lengths[name] = max(rest) - min(rest)
        everything = [*inside.values(), *fixed]
        length = max(everything) - min(everything)
        name = min(lengths, key=lambda each: (lengths[each], each), default="")
        if not name or not 0 < OUTLIER * lengths[name] < length:
            break
        found.add(name)
        del inside[name]
    return frozenset(found)


def cost_range(
    values: Mapping[str, float], *, fixed: Sequence[float] = (), kept: Collection[str] = ()
) -> AxisRange:
    """Return the range of an axis of latency or size. `fixed` values are on it in any case.

    The axis is linear if a value is 0, as of a size that is unknown.
    """
    positive = min([*values.values(), *fixed]) > 0
    scale = math.log if positive else float
    outside = outliers(
        {name: scale(value) for name, value in values.items()},
        fixed=[scale(value) for value in fixed],
        kept=kept,
    )
    inside = [*(value for name, value in values.items() if name not in outside), *fixed]
    low, high = min(inside), max(inside)
    if positive and high > WIDE * low:
        return AxisRange.over(values, low / 1.5, high * 1.5, log=True)
    return AxisRange.over(values, 0.0, high * 1.12 or 1.0)


def score_range(
    values: Mapping[str, float],
    *,
    fixed: Sequence[float] = (),
    kept: Collection[str] = (),
    bars: Mapping[str, Sequence[float]] | None = None,
    bounds: tuple[float, float] = UNBOUNDED,
) -> AxisRange:
    """Return the range of an axis of scores.

    Args:
        values: The scores by name.
        fixed: Other values that are on the axis in any case.
        kept: The names that are never outliers.
        bars: The ends of the error bar of each score, which are on the axis if the score is.
        bounds: The lowest and the highest possible score, beyond which the axis does not reach.
    """
    outside = outliers(values, fixed=fixed, kept=kept)
    inside = [*(value for name, value in values.items() if name not in outside), *fixed]
    inside += [end for name, ends in (bars or {}).items() if name not in outside for end in ends]
    low, high = min(inside), max(inside)
    margin = 0.1 * (high - low) or 0.05 * abs(high) or 1.0
    lowest, highest = bounds_of(values.values(), bounds)
    return AxisRange.over(values, max(low - margin, lowest), min(high + margin, highest))


def bounds_of(values: Iterable[float], bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the bounds if all values keep to them. The metrics of a library may have others."""
    lowest, highest = bounds
    return bounds if all(lowest <= value <= highest for value in values) else UNBOUNDED


def set_range(axes: Axes, axis: Axis, reach: AxisRange) -> None:
    """Give one axis of a chart its range."""
    across = axis is axes.xaxis
    if reach.log:
        (axes.set_xscale if across else axes.set_yscale)("log")
        plain_logarithm(axis, (1, 2, 5))
    (axes.set_xlim if across else axes.set_ylim)(reach.low, reach.high)


def mark_outlier(
    axes: Axes, point: tuple[float, float], across: AxisRange, along: AxisRange, name: str
) -> None:
    """Write at the edge of a chart how far away an outlier is."""
    x, y = point
    if name in across.outside:
        beyond, vertical, text = x > across.high, False, across.label(x, vertical=False)
    else:
        beyond, vertical, text = y > along.high, True, along.label(y, vertical=True)
    offset = (0, -12 if beyond else 12) if vertical else (-8 if beyond else 8, 10)
    axes.annotate(
        text,
        (across.place(x), along.place(y)),
        xytext=offset,
        textcoords="offset points",
        ha="center" if vertical else "right" if beyond else "left",
        va="center",
        fontsize=8,
        color=INK,
    )


def figure(taller: float = 0.0) -> tuple[Figure, Axes]:
    """Return a figure and its axes. `taller` inches are added to the usual height."""
    layout = ConstrainedLayoutEngine(h_pad=MARGIN, w_pad=MARGIN)
    drawing = Figure(figsize=(WIDTH, HEIGHT + taller), layout=layout)
    return drawing, styled(drawing, drawing.add_subplot())


def styled(drawing: Figure, axes: Axes) -> Axes:
    """Give the axes of a figure the style of the reports."""
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.6)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0, pad=6)
    for part in (axes, drawing):
        part.patch.set_alpha(0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(INK)
    return axes


def svg(drawing: Figure) -> str:
    """Return the figure as an SVG element that takes its width and text colour from the page."""
    for label in drawing.findobj(Text):
        # A dollar sign in a name must not start an equation.
        label.set_parse_math(False)
    text = io.StringIO()
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "kdcli", "font.family": "sans-serif"}
    ):
        drawing.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    element = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>", "", text.getvalue(), flags=re.S)
    element = re.sub(rf'<g id="{VALUES}([^"]*)">(.*?)</g>', _with_values, element, flags=re.S)
    # Without its own size, the picture takes the width of its place on the page.
    return re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2).replace(INK, "currentColor")


def show_values(artist: Artist, values: Sequence[str]) -> None:
    """Give each point of an artist a text, which `svg` shows while the mouse is over the point."""
    artist.set_gid(VALUES + quote("\n".join(values)))


def _with_values(group: re.Match[str]) -> str:
    """Return an artist's group in an SVG with its values."""
    values, body = unquote(group[1]).split("\n"), group[2]
    shapes = re.sub(r"<defs>.*?</defs>", "", body, flags=re.S)
    # Markers are references to a shape; single points and patches are paths.
    points = re.findall(r"<use [^>]*/>", shapes) or re.findall(r"<path [^>]*/>", shapes)
    if len(points) == len(values):
        for point, value in zip(points, values, strict=True):
            title = f"<title>{html.escape(value)}</title>"
            if place := re.search(r' x="([\d.-]+)" y="([\d.-]+)"', point):
                # A marker is too small for a mouse.
                x, y = place.groups()
                area = f'<circle cx="{x}" cy="{y}" r="6" fill="none" pointer-events="all">'
                titled = f"{point}{area}{title}</circle>"
            else:
                titled = f'{point[:-2]} pointer-events="all">{title}</path>'
            body = body.replace(point, titled, 1)
    return f'<g class="values">{body}</g>'


def line_chart(
    lines: Sequence[Line],
    across: str,
    along: str = "",
    *,
    columns: int = 0,
    log: bool = False,
    taller: float = 0.0,
    bounds: tuple[float, float] = UNBOUNDED,
) -> tuple[Figure, Axes]:
    """Draw lines over steps.

    `across` and `along` name the axes, and `columns` is the number of columns of the legend. With
    `log` the axis along is logarithmic; losses of zero, of a student that equals its teacher, are
    then not drawn. The axis along does not reach beyond `bounds`.
    """
    drawing, axes = figure(taller)
    for line in lines:
        (drawn,) = axes.plot(
            *zip(*line.points, strict=True),
            label=shortened_line(line.label, 32),
            color=line.colour,
            linestyle=line.dash,
            linewidth=line.width,
            marker=line.marker,
            markersize=3,
            clip_on=log,  # a point at the end of a linear axis lies half outside the axes
        )
        if any(line.bars):
            axes.errorbar(
                [x for x, _ in line.points],
                [y for _, y in line.points],
                yerr=line.bars,
                fmt="none",
                ecolor=line.colour,
                elinewidth=1.2,
                capsize=4,
            )
        if line.marker:
            name = f"{line.label}: " if line.label else ""
            show_values(drawn, [f"{name}{y:.6g}, {across}: {x:,.6g}" for x, y in line.points])
    axes.set(xlabel=across, ylabel=along)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    positive = [y for line in lines for _, y in line.points if y > 0]
    if log and positive:
        axes.set(yscale="log", ylim=(min(positive) / 1.3, max(positive) * 1.3))
        plain_logarithm(axes.yaxis, (1,) if max(positive) / min(positive) > 1e3 else (1, 2, 5))
    lowest, highest = bounds_of((y for line in lines for _, y in line.points), bounds)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, lowest), min(high, highest))
    if columns:
        legend(drawing, columns)
    return drawing, axes


def plain_logarithm(axis: Axis, ticks: tuple[int, ...]) -> None:
    """Write the ticks of a logarithmic axis as plain numbers."""
    axis.set_major_locator(LogLocator(subs=ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def ticks(axes: Axes, places: Sequence[float], *, log: bool) -> None:
    """Set ticks at these places only."""
    if log:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.xaxis.set_minor_locator(NullLocator())


def legend(drawing: Figure, columns: int, chosen: str | None = None) -> None:
    """Draw a legend above the first axes, in at most `columns` columns, with a mark at `chosen`."""
    handles, labels = drawing.axes[0].get_legend_handles_labels()
    labels = [f"{label} (chosen)" if label == chosen else label for label in labels]
    style = {
        "columnspacing": 1.2,
        "handlelength": 1.5,
        "frameon": False,
        "fontsize": 8,
        "labelcolor": INK,
    }
    for count in range(columns, 0, -1):
        drawn = drawing.legend(handles, labels, loc="outside upper left", ncols=count, **style)
        if count == 1 or drawn.get_window_extent().width <= drawing.bbox.width:
            return
        drawn.remove()


@dataclass(frozen=True)
class Scatter:
    """Scores of models over a cost.

    Attributes:
        points: The cost and the score of each model.
        labels: The names of the models in the legend.
        cost, score: The titles of the axes.
        across, along: The ranges of the axes.
        front: The models on the Pareto front, from the cheapest, which a line joins. The others are
            hollow. Without it, all are filled.
        ends: The intervals of the scores that have one.
        chosen: The model that is drawn larger.
    """

    points: Mapping[str, tuple[float, float]]
    labels: Mapping[str, str]
    cost: str
    score: str
    across: AxisRange
    along: AxisRange
    front: Sequence[str] = ()
    ends: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    chosen: str = ""

    @property
    def outside(self) -> list[str]:
        """The models at the edge, since the rest would be too close together."""
        beyond = self.across.outside | self.along.outside
        return [name for name in self.points if name in beyond]

    def draw(self, axes: Axes) -> None:
        """Draw the picture without its legend."""
        across, along = self.across, self.along
        drawn = {name: (across.place(x), along.place(y)) for name, (x, y) in self.points.items()}
        if self.front:
            joined = zip(*(drawn[name] for name in self.front), strict=True)
            axes.step(*joined, where="post", color=INK, linewidth=1, alpha=0.7)
        for number, (name, (x, y)) in enumerate(drawn.items()):
            colour, ends = COLOURS[number % len(COLOURS)], self.ends.get(name)
            low, high = map(along.place, ends or (y, y))
            bars = [[max(0.0, y - low)], [max(0.0, high - y)]] if ends else None
            is_chosen, is_filled = name == self.chosen, name in (self.front or drawn)
            drawn_point, *_ = axes.errorbar(
                [x],
                [y],
                yerr=bars,
                ecolor=colour,
                elinewidth=1,
                capsize=3,
                linestyle="none",
                marker=MARKERS[number % len(MARKERS)],
                markersize=10 if is_chosen else 6,
                markeredgecolor=colour,
                markerfacecolor=colour if is_filled else "none",
                label=self.labels[name],
                clip_on=False,
                # Of models at one place, the largest is below and the hollow ones are on top.
                zorder=2.1 if is_chosen else 2.2 if is_filled else 2.3,
            )
            cost, score = self.points[name]
            interval = f" ({ends[0]:.6g} to {ends[1]:.6g})" if ends else ""
            exact = f"{self.score} {score:.6g}{interval}, {self.cost} {cost:,.6g}"
            show_values(drawn_point, [f"{self.labels[name]}: {exact}"])
            if name in self.outside:
                mark_outlier(axes, self.points[name], across, along, name)
        axes.set(xlabel=self.cost, ylabel=self.score)
        set_range(axes, axes.xaxis, across)
        set_range(axes, axes.yaxis, along)


def scatter_chart(
    points: Mapping[str, tuple[float, float]],
    labels: Mapping[str, str],
    cost: str,
    score: str,
    front: Sequence[str] = (),
    bounds: tuple[float, float] = UNBOUNDED,
) -> str:
    """Return a picture of scores over a cost as SVG; see `Scatter` and `score_range`."""
    costs, scores = ({name: point[i] for name, point in points.items()} for i in (0, 1))
    drawing, axes = figure(0.3 + 0.17 * len(points) / 2)
    along = score_range(scores, bounds=bounds)
    Scatter(points, labels, cost, score, cost_range(costs), along, front).draw(axes)
    legend(drawing, 2)
    return svg(drawing)


def heat_map(
    cells: Cells,
    columns: list[str],
    rows: list[str],
    middle: float,
    *,
    across: str = "",
    apart: int = 0,
) -> str:
    """Draw a heat map with numbers in its cells, the first row on top, as SVG.

    The scale reaches at least a fifth beyond `middle` on either side, so that noise looks like
    noise. `across` names the columns. A gap separates the last `apart` rows and columns.
    """
    shares = [
        (i, j, share)
        for i, row in enumerate(cells)
        for j, share in enumerate(row)
        if share is not None
    ]
    known = [share for *_, share in shares]
    scale = Normalize(min([*known, 0.8 * middle]), max([*known, 1.2 * middle]))
    xs, ys = ([i + 0.25 * (i >= n - apart) for i in range(n)] for n in (len(columns), len(rows)))
    numbered = len(columns) <= MAX_NUMBERS
    drawing, axes = figure(
        ROW * ys[-1] + (0.8 if across else 0.6) + (0.3 if not numbered else 0) - HEIGHT
    )
    axes.grid(False)
    patches = [Rectangle((xs[j] - 0.48, ys[i] - 0.46), 0.96, 0.92) for i, j, _ in shares]
    drawn = PatchCollection(patches, facecolors=SCALE(scale(known)), linewidths=0)
    axes.add_collection(drawn)
    values = [f"layer {rows[i]}, {columns[j]}: {percent(share, 2)} %" for i, j, share in shares]
    show_values(drawn, values)
    if numbered:
        for i, j, share in shares:
            # A narrow cell has room for three characters, and no cell for 100.0.
            whole = 100 * share >= (99.95 if len(columns) <= 12 else 9.95)
            axes.text(
                xs[j],
                ys[i],
                percent(share, 0 if whole else 1),
                ha="center",
                va="center_baseline",
                fontsize=9 if len(columns) <= 10 else 8,
                color=NUMBERS,
            )
    else:
        low, high = scale.vmin or 0.0, scale.vmax or 1.0
        for share in [low + i * (high - low) / 4 for i in range(5)]:
            axes.scatter(
                [], [], marker="s", s=60, color=SCALE(scale(share)), label=f"{percent(share, 1)} %"
            )
        legend(drawing, 5)
    every = 1 if numbered else 4
    axes.set_xticks(xs[every - 1 :: every], columns[every - 1 :: every])
    axes.set_yticks(ys, rows)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(pad=2)
    axes.set(xlim=(-0.5, xs[-1] + 0.5), ylim=(ys[-1] + 0.5, -0.5), xlabel=across, ylabel="layer")
    return svg(drawing)
