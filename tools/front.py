"""Draw the picture of the README: the quality and latency of a compression, and its goal.

    python -m tools.front RUN -o docs/images/front

RUN is the directory of a `kdcli compress`. Writes `front-light.svg` and `front-dark.svg`, and
prints a text for readers who cannot see them. All numbers are from report.json: the latencies, and
the scores on the verification rows with the 95 % interval of the points lost.

The pictures have no background, and their letters stay readable on a telephone.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markupsafe import escape

from kdcli.report.finish import RunResult
from kdcli.report.schema import Candidate, Compression, Verified

WIDTH, HEIGHT = 600, 330
LEFT, RIGHT, TOP, BOTTOM = 84, 14, 40, 64
"""The margins around the axes. Lengths are in units of the picture, as SVG has them."""
FONT = 19
TICK = 0.005
"""The distance between two ticks of the score."""


@dataclass(frozen=True)
class Theme:
    """The colours of a picture."""

    page: str
    ink: str
    grid: str
    teacher: str
    student: str
    goal: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d1d9e0", "#59636e", "#0969da", "#1a7f37"),
    "dark": Theme("#0d1117", "#f0f6fc", "#3d444d", "#9198a1", "#4493f8", "#3fb950"),
}
"""The colours of GitHub's pages."""


@dataclass(frozen=True)
class Scale:
    """The place of latencies and scores in the picture."""

    max_ms: float
    low: float
    high: float

    def x(self, ms: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ms / self.max_ms

    def y(self, score: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - score) / (self.high - self.low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    compression = RunResult.read(options.run).report.compression
    if compression is None or compression.verification is None:
        parser.error(f"{options.run} is not a compression with a verified model")
    teacher, chosen = ends_of(compression)
    if teacher.unstable or chosen.unstable:
        parser.error(f"the latencies of {options.run} are unstable, so they make no picture")
    for name, theme in THEMES.items():
        svg = picture(compression, compression.verification, theme)
        options.output.with_name(f"{options.output.name}-{name}.svg").write_text(svg, "utf-8")
    print(description(compression, compression.verification))


def ends_of(compression: Compression) -> tuple[Candidate, Candidate]:
    """Return the teacher and the model that was chosen."""
    chosen = next(one for one in compression.candidates if one.name == compression.chosen)
    return compression.candidates[0], chosen


def description(compression: Compression, verified: Verified) -> str:
    """Describe the picture in a sentence."""
    teacher, chosen = ends_of(compression)
    return (
        f"{compression.metric.capitalize()} over latency: "
        f"the teacher has {verified.teacher:.4f} at {teacher.ms:.1f} ms, "
        f"and {chosen.name} has {verified.score:.4f} at {chosen.ms:.1f} ms"
    )


def picture(compression: Compression, verified: Verified, theme: Theme) -> str:
    """Return the picture as SVG."""
    teacher, chosen = ends_of(compression)
    assert teacher.ms is not None
    scale = Scale(
        max_ms=1.08 * teacher.ms,
        low=min(verified.low, verified.score) - 0.9 * TICK,
        high=max(verified.high, verified.teacher) + 0.8 * TICK,
    )
    parts = [
        *_axes(scale, compression.metric, theme),
        *_goal(scale, compression, verified, theme),
        *_models(scale, teacher, chosen, verified, theme),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            f'font-size="{FONT}" fill="{theme.ink}">',
            # Text covers the lines behind it.
            f"<style>text {{ paint-order: stroke; stroke: {theme.page}; stroke-width: 6 }}</style>",
            f"<title>{escape(description(compression, verified))}</title>",
            *parts,
            "</svg>\n",
        ]
    )


def _axes(scale: Scale, metric: str, theme: Theme) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    first = int(scale.low / TICK) + 1
    for number in range(first, int(scale.high / TICK) + 1):
        score = number * TICK
        y = scale.y(score)
        yield _line(LEFT, y, right, y, theme.grid)
        yield _text(LEFT - 10, y + FONT / 3, f"{score:.3f}", anchor="end")
    yield _line(LEFT, bottom, right, bottom, theme.ink)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if scale.max_ms / s <= 7)
    for ms in range(0, int(scale.max_ms) + 1, step):
        yield _text(scale.x(ms), bottom + 24, f"{ms}", anchor="middle")
    yield _text((LEFT + right) / 2, HEIGHT - 10, "ms for 128 tokens", anchor="middle")
    yield _text(4, 20, metric)


def _goal(
    scale: Scale, compression: Compression, verified: Verified, theme: Theme
) -> Iterator[str]:
    """Draw the part of the picture that meets the goal."""
    teacher, _ = ends_of(compression)
    assert teacher.ms is not None
    drop, speedup = compression.goal.get("max_drop"), compression.goal.get("speedup")
    if drop is None or speedup is None:
        return
    right, bottom = scale.x(teacher.ms / speedup), scale.y(verified.teacher - drop / 100)
    yield (
        f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT:.1f}" height="{bottom - TOP:.1f}" '
        f'fill="{theme.goal}" fill-opacity="0.18" stroke="{theme.goal}" stroke-dasharray="5 4"/>'
    )
    points = "point" if drop == 1 else "points"
    label = f"goal: {speedup:g} times as fast, at most {drop:g} {points} lost"
    yield _text(WIDTH - RIGHT, 20, label, colour=theme.goal, anchor="end")


def _models(
    scale: Scale, teacher: Candidate, chosen: Candidate, verified: Verified, theme: Theme
) -> Iterator[str]:
    assert teacher.ms is not None
    assert chosen.ms is not None
    x, y = scale.x(teacher.ms), scale.y(verified.teacher)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{theme.teacher}"/>'
    yield _text(x + 8, y + 32, "teacher", anchor="end", bold=True)
    yield _text(x + 8, y + 56, f"{verified.teacher:.4f}, {teacher.ms:.1f} ms", anchor="end")
    x, y = scale.x(chosen.ms), scale.y(verified.score)
    yield _line(x, scale.y(verified.low), x, scale.y(verified.high), theme.student, width=2.5)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{theme.student}"/>'
    lost = 100 * (verified.teacher - verified.score)
    yield _text(x + 36, y + 6, chosen.name, bold=True)
    yield _text(x + 36, y + 30, f"{verified.score:.4f} (-{lost:.2f} points), {chosen.ms:.1f} ms")


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
