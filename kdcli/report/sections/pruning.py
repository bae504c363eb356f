"""Show the share of the weights that a pruning keeps, by type, by layer and while training."""

from kdcli.report.schema import Pruning, Report
from kdcli.report.text import ReportTable, percent

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


def kept_by_layer(pruned: Pruning) -> list[list[float | None]]:
    """Return the shares by layer and by type, each with a last entry over all of them."""
    return [
        [kept(pruned, layer, kind) for kind in (*matrix_types(pruned), None)]
        for layer in (*layers_of(pruned), None)
    ]


def by_type(report: Report) -> ReportTable:
    """Return the kept share of each type and of all weights, and the target, by model."""
    types = matrix_types(*report.pruning)
    rows = [
        [
            p.model,
            *(percent(kept(p, kind=kind)) for kind in types),
            percent(kept(p)),
            percent(1 - p.sparsity),
        ]
        for p in report.pruning
    ]
    meanings = ", ".join(f"{kind}: {TYPES[kind]}" for kind in types if kind in TYPES)
    header = ["model", *types, TOTAL, "target"]
    return ReportTable(
        header, rows, f"Of the weights of the layers' matrices. {meanings}.", style="shares"
    )


def by_layer(pruned: Pruning) -> ReportTable:
    """Return a row for each layer and a column for each type, with totals."""
    names = [*map(str, layers_of(pruned)), TOTAL]
    rows = [
        [name, *map(percent, shares)]
        for name, shares in zip(names, kept_by_layer(pruned), strict=True)
    ]
    return ReportTable(
        ["layer", *matrix_types(pruned), TOTAL], rows, marked=len(rows) - 1, style="shares"
    )


def density_points(report: Report) -> list[tuple[int, dict[str, float]]]:
    """Return the percentage that each model kept after each step."""
    points: dict[int, dict[str, float]] = {}
    for model, point in ((p.model, point) for p in report.pruning for point in p.curve):
        points.setdefault(point.step, {})[model] = 100 * point.density
    return sorted(points.items())


def best_pruned(report: Report) -> str | None:
    """Return the best of several pruned models at the highest sparsity.

    The result is None if the report is about one pruning.
    """
    if len(report.pruning) < 2:
        return None
    most = max(p.sparsity for p in report.pruning)
    # The first metric of a task is the one that decides.
    reached = {
        name: sum(
            next(iter(models[name].values()), 0.0)
            for models in report.quality.values()
            if name in models
        )
        for name in (p.model for p in report.pruning if p.sparsity == most)
    }
    return max(reached, key=reached.__getitem__)
