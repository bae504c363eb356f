"""What a pruning left, as tables of text: the share of the weights that is kept, by type, by layer, over training."""

from __future__ import annotations

from kdcli.report.schema import Pruning, Report
from kdcli.report.sections.latency import cell_name, cells, speedup_of
from kdcli.report.text import Listing, percent

TYPES = ("Q", "K", "V", "O", "U", "G", "D", "P", "P2")
"""Types of matrices, in the order in which they are shown."""

ALL = "all"
"""Name of the row and the column over all layers and types."""

WHAT_TYPES_MEAN = {
    **{"Q": "query", "K": "key", "V": "value", "O": "output of attention", "U": "up projection", "G": "its gate"},
    **{"D": "down projection", "P": "positions", "P2": "positions, queries"},
}


def types_of(*pruned: Pruning) -> list[str]:
    """The types that occur, in the order of TYPES; any other comes last."""
    found = list(dict.fromkeys(m.kind for of in pruned for m in of.matrices))
    return sorted(found, key=lambda kind: TYPES.index(kind) if kind in TYPES else len(TYPES))


def layers_of(pruned: Pruning) -> list[int]:
    """Numbers of the layers, in the order of the report."""
    return list(dict.fromkeys(m.layer for m in pruned.matrices))


def kept(pruned: Pruning, layer: int | None = None, kind: str | None = None) -> float | None:
    """Share of the weights that is kept, of one layer or one type or both; None where there are none."""
    found = [m for m in pruned.matrices if layer in (None, m.layer) and kind in (None, m.kind)]
    weights = sum(m.weights for m in found)
    return sum(m.kept for m in found) / weights if weights else None


def sparsities(report: Report) -> str:
    """What was asked to go: `50 %, 90 %`."""
    return ", ".join(f"{100 * sparsity:g} %" for sparsity in dict.fromkeys(p.sparsity for p in report.pruning))


def methods(report: Report) -> str:
    """How it was made to go: `smp, movement`."""
    return ", ".join(dict.fromkeys(p.method for p in report.pruning))


def by_type(report: Report) -> Listing | None:
    """A row a pruned model: the share kept of each type and of all, beside what was asked for; None where nothing was
    pruned."""
    if not report.pruning:
        return None
    types = types_of(*report.pruning)
    rows = [
        [p.model, *(percent(kept(p, kind=kind)) for kind in types), percent(kept(p)), percent(1 - p.sparsity)]
        for p in report.pruning
    ]
    note = "Of the weights of the layers' matrices. " + ", ".join(
        f"{kind}: {WHAT_TYPES_MEAN[kind]}" for kind in types if kind in WHAT_TYPES_MEAN
    )
    return Listing("Weights kept, in percent", ["model", *types, ALL, "asked"], rows, f"{note}.")


def by_layer(pruned: Pruning) -> Listing:
    """A row a layer, a column a type, and over all of either."""
    types = types_of(pruned)
    rows = [
        [ALL if layer is None else str(layer), *(percent(kept(pruned, layer, kind)) for kind in (*types, None))]
        for layer in (*layers_of(pruned), None)
    ]
    title = f"{pruned.model}: weights kept by layer and type, in percent"
    return Listing(title, ["layer", *types, ALL], rows, marked=len(rows) - 1)


def density_points(report: Report) -> list[tuple[int, dict[str, float] | None]]:
    """Step → percent that each model kept after it."""
    found: dict[int, dict[str, float]] = {}
    for p in report.pruning:
        for point in p.curve:
            found.setdefault(point.step, {})[p.model] = 100 * point.density
    return sorted(found.items())


def foremost(report: Report) -> str | None:
    """Of several pruned models the best of those from which most was asked to go; None of one model in its forms."""
    if len(report.pruning) < 2:
        return None
    most = max(p.sparsity for p in report.pruning)
    # The first metric of a task is the one that matters.
    reached = {
        name: sum(next(iter(of[name].values()), 0.0) for of in report.quality.values() if name in of)
        for name in (p.model for p in report.pruning if p.sparsity == most)
    }
    return max(reached, key=reached.__getitem__)


def facts(report: Report) -> list[tuple[str, str]]:
    """How little is kept of the foremost model, and the form that is fastest."""
    if not report.pruning:
        return []
    name = foremost(report)
    least = next(p for p in report.pruning if name in (None, p.model))
    found = [(f"{percent(least.density, 1)} %", f"of the layers' weights kept, {least.method}")]
    cell, rows = next(iter(cells(report).items()), ((0, 0), []))
    if ratios := [(s, row) for row in rows if (s := speedup_of(report, row))]:
        best, row = max(ratios, key=lambda pair: pair[0].median)
        first = next(iter(report.models))
        label = f"the speed of {first}: {row.model}, {cell_name(cell)} ({best.low:.1f}–{best.high:.1f})"
        found.append((f"{best.median:.1f}×", label))
    return found
