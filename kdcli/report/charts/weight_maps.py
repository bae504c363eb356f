"""Draw a pruning: the kept weights by layer, type and head, and density and scores over time."""

import numpy as np

from kdcli.report.charts.drawing import (
    COLOURS,
    HEIGHT,
    INK,
    Line,
    figure,
    heat_map,
    line_chart,
    svg,
)
from kdcli.report.schema import Histogram, Pruning
from kdcli.report.sections.kept_weights import TOTAL, kept, kept_by_layer, layers_of, matrix_types
from kdcli.report.text import Picture, percent

MAX_RIDGES = 7  # steps whose distribution of scores is drawn
TAIL = 5e-4  # share of the scores at either end that the picture may cut off


def model_pictures(pruned: Pruning) -> list[Picture]:
    """Return the pictures that a pruned model has numbers for."""
    return [p for draw in (type_map, head_map, density_curve, score_ridges) if (p := draw(pruned))]


def type_map(pruned: Pruning) -> Picture | None:
    """Draw the kept share by layer (rows) and type (columns), with totals."""
    if not pruned.matrices:
        return None
    types, layers, cells = matrix_types(pruned), layers_of(pruned), kept_by_layer(pruned)
    own = {f"{m.layer}.{m.kind}": kept(pruned, m.layer, m.kind) or 0.0 for m in pruned.matrices}
    drawing = heat_map(cells, [*types, TOTAL], [*map(str, layers), TOTAL], pruned.density, apart=1)
    caption = (
        f"{pruned.model}: weights kept by layer and type of matrix, in percent. {_extremes(own)}; "
        f"of all {percent(kept(pruned), 1)} %."
    )
    return Picture(drawing, caption)


def head_map(pruned: Pruning) -> Picture | None:
    """Draw the share of Q, K, V and O that each attention head keeps, if there are heads."""
    if not any(pruned.heads):
        return None
    by_layer = dict(zip(map(str, layers_of(pruned)), pruned.heads, strict=True))
    own = {
        f"layer {layer}, head {i}": share
        for layer, row in by_layer.items()
        for i, share in enumerate(row, 1)
    }
    heads = [str(head + 1) for head in range(max(map(len, pruned.heads)))]
    mean = sum(own.values()) / len(own)
    drawing = heat_map(pruned.heads, heads, list(by_layer), mean, across="head")
    caption = (
        f"{pruned.model}: weights of Q, K, V and O kept by attention head, in percent. "
        f"{_extremes(own)}; mean {percent(mean, 1)} %."
    )
    return Picture(drawing, caption)


def _extremes(shares: dict[str, float]) -> str:
    low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return f"Least {percent(shares[low], 1)} % ({low}), most {percent(shares[high], 1)} % ({high})"


def density_curve(pruned: Pruning) -> Picture | None:
    """Draw the kept percentage over the steps, if it was logged twice, and the requested share."""
    points = [(point.step, 100 * point.density) for point in pruned.curve]
    if len(points) < 2:
        return None
    requested = 100 * (1 - pruned.sparsity)
    drawing, axes = line_chart([Line("", points, COLOURS[0])], "step", "weights kept, %")
    axes.axhline(requested, color=INK, linewidth=1, linestyle="--")
    axes.set_ylim(0, 105)
    subject = (
        f"{pruned.model}: weights kept while training, {points[0][1]:.1f} → {points[-1][1]:.1f} %"
    )
    return Picture(
        svg(drawing), f"{subject}; the dashed line is the requested share, {requested:g} %."
    )


def score_ridges(pruned: Pruning) -> Picture | None:
    """Draw the distribution of the scores after several steps, the first step on top.

    There is no picture if a method has no scores or if its scores never differ.
    """
    spread = [h for h in pruned.histograms if sum(count > 0 for count in h.counts) > 1]
    if not spread:
        return None
    chosen = np.unique(
        np.linspace(0, len(spread) - 1, min(MAX_RIDGES, len(spread))).round().astype(int)
    )
    histograms = [spread[i] for i in chosen]
    drawing, axes = figure(0.42 * len(histograms) + 0.6 - HEIGHT)
    axes.grid(False, axis="y")
    for base, histogram in enumerate(reversed(histograms)):
        heights = base + 0.88 * np.array(histogram.counts, dtype=np.float64) / max(histogram.counts)
        edges, colour = histogram.edges, COLOURS[0]
        axes.stairs(heights, edges, baseline=base, color=colour, fill=True, alpha=0.3)
        axes.stairs(heights, edges, baseline=base, color=colour, linewidth=1.1)
    ranges = [_middle(h) for h in histograms]
    low, high = min(a for a, _ in ranges), max(b for _, b in ranges)
    axes.set_yticks(range(len(histograms)), [f"{h.step:,}" for h in reversed(histograms)])
    reach = low - 0.02 * (high - low), high + 0.02 * (high - low)
    axes.set(xlim=reach, ylim=(-0.05, len(histograms)), xlabel="score", ylabel="step")
    first, last = ranges[0], ranges[-1]
    steps = ", ".join(f"{h.step:,}" for h in histograms)
    subject = f"{pruned.model}: distribution of the scores after steps {steps}"
    where = (
        f"From {first[0]:.2g} to {first[1]:.2g} at first, {last[0]:.2g} to {last[1]:.2g} at last"
    )
    ends = f"but for {100 * TAIL:g} % at either end"
    text = f"{subject}, each as high as its fullest bar. {where}, {ends}."
    return Picture(svg(drawing), text)


def _middle(histogram: Histogram) -> tuple[float, float]:
    """Return the range that holds all but TAIL of the scores at either end."""
    total = np.cumsum(histogram.counts)
    first = int(np.searchsorted(total, TAIL * total[-1], side="right"))
    last = int(np.searchsorted(total, (1 - TAIL) * total[-1]))
    return histogram.edges[first], histogram.edges[last + 1]
