"""Pictures of a pruning: what is kept by layer and type and by attention head, density and scores over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from kdcli.report.pictures.drawing import COLOURS, HEIGHT, INK, Picture, figure, legend, svg
from kdcli.report.schema import Histogram, Pruning
from kdcli.report.sections.pruning import ALL, kept, layers_of, types_of
from kdcli.report.text import percent

SCALE = LinearSegmentedColormap.from_list("kept", ["#fff6d5", "#c4e4c1", "#6fbcca", "#4f93d6"])
"""Ever darker, so that no colour has to be told from another; light enough for dark numbers."""

NUMBERS = "#16202c"
"""Colour of the numbers on SCALE, on a dark page too."""

MOST_NUMBERS = 16
"""Columns of a map up to which a number fits into a cell."""

ROW = 0.235
"""Inches of a row of a map."""

MOST_RIDGES = 7
"""Steps whose distribution of scores is drawn."""

TAIL = 5e-4
"""Share of the scores at either end that may lie beyond the picture."""

Cells = Sequence[Sequence[float | None]]
"""Shares, row by row; rows may differ in length, and None is no cell."""


def of_model(pruned: Pruning) -> list[Picture]:
    """The pictures of one model that it has numbers for."""
    found = [type_map(pruned), head_map(pruned), density_curve(pruned), score_ridges(pruned)]
    return [p for p in found if p is not None]


def type_map(pruned: Pruning) -> Picture | None:
    """Share kept by layer (rows) and type (columns), and over all of either."""
    if not pruned.matrices:
        return None
    types, layers = types_of(pruned), layers_of(pruned)
    cells = [[kept(pruned, layer, kind) for kind in (*types, None)] for layer in (*layers, None)]
    own = {
        f"{layer}.{kind}": share
        for layer, of in zip(layers, cells, strict=False)
        for kind, share in zip(types, of, strict=False)
        if share is not None
    }
    drawing = _map(cells, [*types, ALL], [*map(str, layers), ALL], pruned.density, apart=1)
    said = f"{pruned.model}: weights kept by layer and type of matrix, in percent. {_extremes(own)}"
    return Picture(drawing, f"{said}; of all {percent(kept(pruned), 1)} %.")


def head_map(pruned: Pruning) -> Picture | None:
    """Share of the weights of Q, K, V and O that each attention head keeps; None where there are no heads."""
    if not any(pruned.heads):
        return None
    layers = layers_of(pruned)
    own = {
        f"layer {layer}, head {head}": share
        for layer, of in zip(layers, pruned.heads, strict=True)
        for head, share in enumerate(of, 1)
    }
    most = max(map(len, pruned.heads))
    mean = sum(own.values()) / len(own)
    drawing = _map(pruned.heads, [str(head + 1) for head in range(most)], [str(n) for n in layers], mean, across="head")
    said = f"{pruned.model}: weights of Q, K, V and O kept by attention head, in percent. {_extremes(own)}"
    return Picture(drawing, f"{said}; mean {percent(mean, 1)} %.")


def _extremes(shares: dict[str, float]) -> str:
    low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return f"Least {percent(shares[low], 1)} % ({low}), most {percent(shares[high], 1)} % ({high})"


def _map(cells: Cells, columns: list[str], rows: list[str], middle: float, *, across: str = "", apart: int = 0) -> str:
    """A heat map with numbers in its cells, the first row on top.

    Args:
        middle: share that the scale has at least a fifth of on either side, so that noise looks like noise.
        across: what the columns are, where their names do not say it.
        apart: last rows and columns that stand off from the others.
    """
    known = [share for of in cells for share in of if share is not None]
    scale = Normalize(min([*known, 0.8 * middle]), max([*known, 1.2 * middle]))
    across_at, down_at = ([i + 0.25 * (i >= n - apart) for i in range(n)] for n in (len(columns), len(rows)))
    numbered = len(columns) <= MOST_NUMBERS
    drawing, axes = figure(ROW * down_at[-1] + (0.8 if across else 0.6) + (0.3 if not numbered else 0) - HEIGHT)
    axes.grid(False)
    drawn = [
        (across_at[j], down_at[i], share)
        for i, of in enumerate(cells)
        for j, share in enumerate(of)
        if share is not None
    ]
    patches = [Rectangle((x - 0.48, y - 0.46), 0.96, 0.92) for x, y, _ in drawn]
    axes.add_collection(PatchCollection(patches, facecolors=SCALE(scale([share for *_, share in drawn])), linewidths=0))
    if numbered:
        for x, y, share in drawn:
            # In narrow cells three characters; none has room for 100.0.
            whole = 100 * share >= (99.95 if len(columns) <= 12 else 9.95)
            text = percent(share, 0 if whole else 1)
            axes.text(
                x, y, text, ha="center", va="center_baseline", fontsize=9 if len(columns) <= 10 else 8, color=NUMBERS
            )
    else:
        shades = np.linspace(scale.vmin or 0.0, scale.vmax or 1.0, 5)
        for share in shades:
            axes.scatter([], [], marker="s", s=60, color=SCALE(scale(share)), label=f"{percent(share, 1)} %")
        legend(drawing, len(shades))
    axes.set_xlim(-0.5, across_at[-1] + 0.5)
    axes.set_ylim(down_at[-1] + 0.5, -0.5)
    every = 1 if numbered else 4
    axes.set_xticks(across_at[every - 1 :: every], columns[every - 1 :: every])
    axes.set_yticks(down_at, rows)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(pad=2)
    axes.set_xlabel(across)
    axes.set_ylabel("layer")
    return svg(drawing)


def density_curve(pruned: Pruning) -> Picture | None:
    """Percent kept over steps, and what was asked for; None where it was noted less than twice."""
    points = [(point.step, 100 * point.density) for point in pruned.curve]
    if len(points) < 2:
        return None
    asked = 100 * (1 - pruned.sparsity)
    drawing, axes = figure()
    axes.axhline(asked, color=INK, linewidth=1, linestyle="--")
    axes.plot(*zip(*points, strict=True), color=COLOURS[0], linewidth=1.6, marker="o", markersize=2.5)
    axes.set_ylim(0, 105)
    axes.set_xlabel("step")
    axes.set_ylabel("weights kept, %")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    (_, first), *_, (_, last) = points
    return Picture(
        svg(drawing),
        f"{pruned.model}: weights kept while training, {first:.1f} → {last:.1f} %; dashed what was asked, {asked:g} %.",
    )


def score_ridges(pruned: Pruning) -> Picture | None:
    """How the scores are distributed after several steps, the first on top, each as high as its fullest bin; None
    where a method has no scores or they never differ."""
    spread = [h for h in pruned.histograms if sum(count > 0 for count in h.counts) > 1]
    if not spread:
        return None
    chosen = np.unique(np.linspace(0, len(spread) - 1, min(MOST_RIDGES, len(spread))).round().astype(int))
    shown = [spread[i] for i in chosen]
    ranges = [_middle(h) for h in shown]
    drawing, axes = figure(0.42 * len(shown) + 0.6 - HEIGHT)
    axes.grid(False, axis="y")
    for row, histogram in enumerate(shown):
        _ridge(axes, histogram, len(shown) - 1 - row)
    low, high = min(a for a, _ in ranges), max(b for _, b in ranges)
    axes.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    axes.set_ylim(-0.05, len(shown))
    axes.set_yticks(range(len(shown)), [f"{h.step:,}" for h in reversed(shown)])
    axes.set_xlabel("score")
    axes.set_ylabel("step")
    first, last = ranges[0], ranges[-1]
    return Picture(
        svg(drawing),
        f"{pruned.model}: distribution of the scores after steps {', '.join(f'{h.step:,}' for h in shown)}, each as "
        f"high as its fullest bar. From {first[0]:.2g} to {first[1]:.2g} at first, {last[0]:.2g} to {last[1]:.2g} at "
        f"last, but for {100 * TAIL:g} % at either end.",
    )


def _ridge(axes: Any, histogram: Histogram, base: int) -> None:
    counts = np.array(histogram.counts, dtype=np.float64)
    heights = base + 0.88 * counts / counts.max()
    axes.stairs(heights, histogram.edges, baseline=base, fill=True, color=COLOURS[0], alpha=0.3)
    axes.stairs(heights, histogram.edges, baseline=base, color=COLOURS[0], linewidth=1.1)


def _middle(histogram: Histogram) -> tuple[float, float]:
    """The range that holds all but TAIL of the scores at either end."""
    total = np.cumsum(histogram.counts)
    first = int(np.searchsorted(total, TAIL * total[-1], side="right"))
    last = int(np.searchsorted(total, (1 - TAIL) * total[-1]))
    return histogram.edges[first], histogram.edges[last + 1]
