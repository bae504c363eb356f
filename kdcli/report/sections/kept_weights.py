"""Show the share of the weights that a pruning keeps, by type, by layer and while training."""

import itertools
import statistics
from dataclasses import replace
from functools import partial

from kdcli.report.schema import Pruning, Report
from kdcli.report.sections.curves import curve_section
from kdcli.report.text import ReportSection, View, percent

MAX_OPEN_PRUNED = 3  # with more pruned models, their tables are closed in HTML

TYPES = {
    "Q": "query",
    "K": "key",
    "V": "value",
    "O": "output of attention",
    "U": "up projection",
    "G": "its gate",
    "D": "down projection",
    "P": "positions",
    "P2": "positions, queries",
}
"""Types of matrices in the order of the tables, and their meanings."""
DENSITY_ERROR = 0.01
"""The share of the weights that a pruning may keep beyond its target."""
SPREAD = "over heads"
TOTAL = "all"  # name of the row and the column over all layers and types


def matrix_types(*pruned: Pruning) -> list[str]:
    """Return the types that occur, in the order of TYPES, and other types last."""
    order, kinds = list(TYPES), dict.fromkeys(m.kind for p in pruned for m in p.matrices)
    return sorted(kinds, key=lambda kind: order.index(kind) if kind in order else len(order))


def layers_of(pruned: Pruning) -> list[int]:
    """Return the numbers of the layers, in the order of the report."""
    return list(dict.fromkeys(m.layer for m in pruned.matrices))


def kept(pruned: Pruning, layer: int | None = None, kind: str | None = None) -> float | None:
    """Return the share of the weights that is kept, of a layer, a type, or both.

    The result is None if there are no such weights.
    """
    chosen = [m for m in pruned.matrices if layer in (None, m.layer) and kind in (None, m.kind)]
    weights = sum(m.weights for m in chosen)
    return sum(m.kept for m in chosen) / weights if weights else None


def head_spread(pruned: Pruning) -> float | None:
    """Return the standard deviation of the shares of all heads; None without heads."""
    shares = list(itertools.chain.from_iterable(pruned.heads))
    return statistics.pstdev(shares) if shares else None


def kept_by_layer(pruned: Pruning) -> list[list[float | None]]:
    """Return the shares by layer and by type, each with a last entry over all of them."""
    return [
        [kept(pruned, layer, kind) for kind in (*matrix_types(pruned), None)]
        for layer in (*layers_of(pruned), None)
    ]


def pruning_sections(report: Report) -> list[ReportSection]:
    """Show which weights are kept: by type, by layer, in pictures, and while training."""
    if not report.pruning:
        return []
    types = [*matrix_types(*report.pruning), None]
    rows = [
        [
            p.model,
            *(percent(kept(p, kind=kind)) for kind in types),
            percent(head_spread(p)),
            # A threshold decides the density itself.
            percent(None if p.masking == "threshold" else 1 - p.sparsity),
        ]
        for p in report.pruning
    ]
    is_open = len(report.pruning) <= MAX_OPEN_PRUNED
    parts = [replace(_by_layer(p), open=is_open) for p in report.pruning]
    points: dict[int, dict[str, float]] = {}
    for model, point in ((p.model, point) for p in report.pruning for point in p.curve):
        points.setdefault(point.step, {})[model] = 100 * point.density
    parts.append(curve_section("Weights kept while training, in percent", sorted(points.items())))
    names = [kind or TOTAL for kind in types]
    meanings = ", ".join(f"{kind}: {TYPES[kind]}" for kind in names if kind in TYPES)
    return [
        ReportSection(
            "Weights kept, in percent",
            ["model", *names, SPREAD, "target"],
            rows,
            f"Of the weights of the layers' matrices. {meanings}. {SPREAD}: standard deviation, in "
            "points, of the shares of Q, K, V and O that the attention heads keep.",
            style="shares",
            parts=parts,
        )
    ]


def _by_layer(pruned: Pruning) -> ReportSection:
    """Show a row for each layer and a column for each type, with totals."""
    # Importing matplotlib takes a third of a second, and only a finished run needs it.
    from kdcli.report.charts.weight_maps import model_pictures

    names = [*map(str, layers_of(pruned)), TOTAL]
    shares = zip(names, kept_by_layer(pruned), strict=True)
    return ReportSection(
        f"{pruned.model}: weights kept by layer and type, in percent",
        ["layer", *matrix_types(pruned), TOTAL],
        [[name, *map(percent, row)] for name, row in shares],
        marked=len(names) - 1,
        style="shares",
        draw=partial(model_pictures, pruned),
        least=View.MARKDOWN,
    )


def best_pruned(report: Report) -> str | None:
    """Return the best of several pruned models at the highest sparsity.

    A method without a target may keep more weights, and is compared only with others of its kind.
    The result is None if the report is about one pruning.
    """
    if len(report.pruning) < 2:
        return None
    most = max(p.sparsity for p in report.pruning)
    pruned = [p for p in report.pruning if p.sparsity == most]
    reaching = [p for p in pruned if p.density <= 1 - most + DENSITY_ERROR] or pruned
    # The first metric of a task is the one that decides.
    reached = {
        name: sum(
            next(iter(models[name].values()), 0.0)
            for models in report.quality.values()
            if name in models
        )
        for name in (p.model for p in reaching)
    }
    return max(reached, key=reached.__getitem__)
