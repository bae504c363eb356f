"""Draw the picture of the README: the quality of models over their latency.

    python -m tools.front RUN --metric mrr@10 --batch-size 8 \\
      --published paraphrase-MiniLM-L3-v2 -o docs/images/front

RUN is the directory of a `kdcli evaluate` that measured latency. Writes `front-light.svg` and
`front-dark.svg`, and prints a text for readers who cannot see them. All numbers are from
report.json: the latency per text at the batch size, the scores, and the 95 % interval of the
difference to the first model.
"""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import escape

from kdcli.metrics.bootstrap import range_of
from kdcli.report.charts.drawing import (
    COLOURS,
    cost_range,
    figure,
    score_range,
    set_range,
    svg,
)
from kdcli.report.finish import RunResult
from kdcli.report.schema import Report

THEMES = {"light": "#1f2328", "dark": "#f0f6fc"}
"""The colour of the text on GitHub's pages. The pictures have no background."""
ROLES = {"teacher": "#808a94", "student": COLOURS[0], "published": COLOURS[1]}
"""The colours of the models by what they are in the picture."""


@dataclass(frozen=True)
class Point:
    """A model in the picture.

    Attributes:
        name: Its name in the report.
        ms: Milliseconds per text.
        score: Its score, between 0 and 1.
        low, high: The score's interval, paired with the teacher. Both are `score` for the teacher.
        role: A key of ROLES.
    """

    name: str
    ms: float
    score: float
    low: float
    high: float
    role: str

    @property
    def time(self) -> str:
        return f"{self.ms:.2g} ms" if self.ms < 10 else f"{self.ms:.0f} ms"


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
    for name, ink in THEMES.items():
        text = picture(points, options.metric, ink, options.batch_size)
        options.output.with_name(f"{options.output.name}-{name}.svg").write_text(text, "utf-8")
    print(description(points, options.metric))


def points_of(
    report: Report,
    metric: str,
    published: Collection[str],
    batch_size: int = 1,
    without: Collection[str] = (),
) -> list[Point]:
    """Return the models of a report that were scored and timed, the teacher first.

    Raises:
        ValueError: A model was not timed, or its latency is unstable.
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
        points.append(Point(name, times[name].p50_ms / batch_size, score, low, high, role))
    return points


def description(points: Sequence[Point], metric: str) -> str:
    """Describe the picture in a sentence."""
    parts = [f"{one.name} has {one.score:.3f} at {one.time}" for one in points]
    return f"{_label(metric)} over latency: {', '.join(parts)}"


def picture(points: Sequence[Point], metric: str, ink: str, batch_size: int = 1) -> str:
    """Return the picture as SVG, with text in the colour `ink`."""
    drawing, axes = figure()
    times = cost_range({one.name: one.ms for one in points})
    bars = {one.name: (one.low, one.high) for one in points}
    by_name = {one.name: one.score for one in points}
    scores = score_range(by_name, bars=bars, bounds=range_of(metric))
    set_range(axes, axes.xaxis, times)
    set_range(axes, axes.yaxis, scores)
    middle = axes.transAxes.transform((0.5, 0.5))[0]
    for one in points:
        colour, ends = ROLES[one.role], [[one.score - one.low], [one.high - one.score]]
        axes.errorbar([one.ms], [one.score], yerr=ends, fmt="o", color=colour, markersize=6)
        # Labels stay on the side of the picture that has room for them.
        side = "right" if axes.transData.transform((one.ms, one.score))[0] > middle else "left"
        axes.annotate(
            f"{one.name}\n{one.score:.3f}, {one.time}",
            (one.ms, one.score),
            xytext=(-8 if side == "right" else 8, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8,
            color=colour,
        )
    label = "ms for one text" if batch_size == 1 else f"ms per text, in batches of {batch_size}"
    axes.set(xlabel=label, ylabel=_label(metric))
    title = f"<title>{escape(description(points, metric))}</title>"
    begin, end, rest = svg(drawing).replace("currentColor", ink).partition(">")
    return f"{begin}{end}{title}{rest}\n"


def _label(metric: str) -> str:
    return metric.upper() if metric.startswith(("mrr", "f1")) else metric


if __name__ == "__main__":
    main()
