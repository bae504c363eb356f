"""Draw the picture of the README: the quality of models over their latency.

    python -m tools.front RUN --metric mrr@10 --batch-size 8 \\
      --published paraphrase-MiniLM-L3-v2 -o docs/images/front

RUN is the directory of a `kdcli evaluate` that measured latency. Writes `front-light.svg` and
`front-dark.svg`, and prints a text for readers who cannot see them. All numbers are from
report.json: the latency per text at the batch size, the scores, and the 95 % interval of the
difference to the first model.

The pictures have no background, and their letters stay readable on a telephone.
"""

import argparse
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import escape

from kdcli.report.finish import RunResult
from kdcli.report.schema import Report

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 40, 64
"""The margins around the axes. Lengths are in units of the picture, as SVG has them."""
FONT = 18
LETTER = 0.56 * FONT
"""The mean width of a letter."""
TICKS = (0.005, 0.01, 0.02, 0.05, 0.1)
"""Distances between two ticks of the score. The first that leaves at most eight is taken."""


@dataclass(frozen=True)
class Theme:
    """The colours of a picture."""

    page: str
    ink: str
    grid: str
    teacher: str
    student: str
    published: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d1d9e0", "#59636e", "#0969da", "#bc4c00"),
    "dark": Theme("#0d1117", "#f0f6fc", "#3d444d", "#9198a1", "#4493f8", "#db6d28"),
}
"""The colours of GitHub's pages."""


@dataclass(frozen=True)
class Point:
    """A model in the picture.

    Attributes:
        name: its name in the report.
        ms: milliseconds per text.
        score: its score, between 0 and 1.
        low, high: the score's interval, paired with the teacher. Both are `score` for the teacher.
        role: `teacher`, `student` or `published`, a name of a colour.
    """

    name: str
    ms: float
    score: float
    low: float
    high: float
    role: str


@dataclass(frozen=True)
class Scale:
    """The place of latencies and scores in the picture. Latencies are on a logarithmic axis."""

    fastest: float
    slowest: float
    low: float
    high: float

    @classmethod
    def of(cls, points: Sequence[Point]) -> "Scale":
        """Return a scale with room around all points."""
        times, lows = [point.ms for point in points], [point.low for point in points]
        highs = [point.high for point in points]
        margin = 0.1 * (max(highs) - min(lows))
        return cls(min(times) / 1.8, max(times) * 1.8, min(lows) - margin, max(highs) + margin)

    def x(self, ms: float) -> float:
        share = math.log(ms / self.fastest) / math.log(self.slowest / self.fastest)
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(self, score: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - score) / (self.high - self.low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--metric", required=True)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], metavar="MODEL")
    parser.add_argument("--published", nargs="*", default=[], metavar="MODEL")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    report = RunResult.read(options.run).report
    try:
        points = points_of(
            report, options.metric, options.published, options.batch_size, options.without
        )
    except ValueError as error:
        parser.error(str(error))
    for name, theme in THEMES.items():
        svg = picture(points, options.metric, theme, options.batch_size)
        options.output.with_name(f"{options.output.name}-{name}.svg").write_text(svg, "utf-8")
    print(description(points, options.metric))


def points_of(
    report: Report,
    metric: str,
    published: Collection[str],
    batch_size: int = 1,
    without: Collection[str] = (),
) -> list[Point]:
    """Return the models of a report that were scored and timed, the teacher first.

    Raises ValueError: a model was not timed, or its latency is unstable.
    """
    times = {row.model: row for row in report.latency if row.batch_size == batch_size}
    compared = {one.model: one for one in report.comparisons if one.metric == metric}
    points = []
    known = {evaluation.model for evaluation in report.evaluations}
    if unknown := {*published, *without} - known:
        raise ValueError(f"the report has no model {', '.join(sorted(unknown))}")
    for evaluation in report.evaluations:
        name, score = evaluation.model, evaluation.metrics[metric]
        if name in without:
            continue
        if name not in times or times[name].status == "unstable":
            raise ValueError(f"{name} has no stable latency, so it makes no picture")
        low = high = score
        if name in compared:
            low = score - compared[name].difference + compared[name].low
            high = score - compared[name].difference + compared[name].high
        role = "published" if name in published else "student" if name in compared else "teacher"
        ms = times[name].p50_ms / batch_size
        points.append(Point(name, ms, score, low, high, role))
    return points


def description(points: Sequence[Point], metric: str) -> str:
    """Describe the picture in a sentence."""
    parts = [f"{one.name} has {one.score:.3f} at {_ms(one.ms)}" for one in points]
    return f"{_label(metric)} over latency: {', '.join(parts)}"


def picture(points: Sequence[Point], metric: str, theme: Theme, batch_size: int = 1) -> str:
    """Return the picture as SVG."""
    scale = Scale.of(points)
    models = list(_models(scale, points, theme))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            f'font-size="{FONT}" fill="{theme.ink}">',
            # Text covers the lines behind it.
            f"<style>text {{ paint-order: stroke; stroke: {theme.page}; stroke-width: 6 }}</style>",
            f"<title>{escape(description(points, metric))}</title>",
            *_axes(scale, metric, theme, batch_size),
            *models,
            "</svg>\n",
        ]
    )


def _axes(scale: Scale, metric: str, theme: Theme, batch_size: int) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    tick = next(one for one in TICKS if (scale.high - scale.low) / one <= 8)
    for number in range(math.ceil(scale.low / tick), int(scale.high / tick) + 1):
        y = scale.y(number * tick)
        yield _line(LEFT, y, right, y, theme.grid)
        yield _text(LEFT - 10, y + FONT / 3, f"{number * tick:.3g}", anchor="end")
    yield _line(LEFT, bottom, right, bottom, theme.ink)
    for power in range(-3, 4):
        for digit in (1, 3):
            ms = digit * 10.0**power
            if scale.fastest <= ms <= scale.slowest:
                yield _text(scale.x(ms), bottom + 24, f"{ms:g}", anchor="middle")
    label = "ms for one text" if batch_size == 1 else f"ms per text, in batches of {batch_size}"
    yield _text((LEFT + right) / 2, HEIGHT - 10, label, anchor="middle")
    yield _text(4, 20, _label(metric))


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """Return the area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


INSIDE = Box(LEFT, 4, WIDTH, HEIGHT - BOTTOM)
"""Where labels should be."""


def _models(scale: Scale, points: Sequence[Point], theme: Theme) -> Iterator[str]:
    """Draw the points and bars, and then the labels where they cover least."""
    taken = []
    for point in points:
        x, y = scale.x(point.ms), scale.y(point.score)
        colour = getattr(theme, point.role)
        if point.high > point.low:
            top, bottom = scale.y(point.high), scale.y(point.low)
            yield _line(x, top, x, bottom, colour, width=2.5)
            taken.append(Box(x - 2, top, x + 2, bottom))
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{colour}"/>'
        taken.append(Box(x - 9, y - 9, x + 9, y + 9))
    for point in points:
        lines = point.name, f"{point.score:.3f}, {_ms(point.ms)}"
        width, height = LETTER * max(map(len, lines)), 2 * FONT + 4
        box = min(
            _places(scale, point, width, height),
            key=lambda place: sum(map(place.overlap, taken)) - place.overlap(INSIDE),
        )
        taken.append(box)
        middle, colour = (box.left + box.right) / 2, getattr(theme, point.role)
        base = box.top + FONT
        yield _text(middle, base, lines[0], anchor="middle", colour=colour, bold=True)
        yield _text(middle, base + FONT + 2, lines[1], anchor="middle")


def _places(scale: Scale, point: Point, width: float, height: float) -> Iterator[Box]:
    """Yield the places for a label, the best first: beside the point, above and below its bar."""
    x, y = scale.x(point.ms), scale.y(point.score)
    above, below = scale.y(point.high) - 10 - height, scale.y(point.low) + 8
    centred = min(max(x - width / 2, LEFT), WIDTH - width - 4)
    for left, top in (
        (x + 14, y - height / 2),
        (x - 14 - width, y - height / 2),
        (centred, above),
        (centred, below),
    ):
        yield Box(left, top, left + width, top + height)


def _label(metric: str) -> str:
    return metric.upper() if metric.startswith(("mrr", "f1")) else metric


def _ms(ms: float) -> str:
    return f"{ms:.2g} ms" if ms < 10 else f"{ms:.0f} ms"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="{width:g}"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str | None = None,
    bold: bool = False,
) -> str:
    style = f' fill="{colour}"' if colour is not None else ""
    style += ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
