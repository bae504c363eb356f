"""Draw a pruning: the kept weights by layer, type and head."""

from kdcli.report.charts.drawing import heat_map
from kdcli.report.schema import Pruning
from kdcli.report.sections.kept_weights import TOTAL, kept, kept_by_layer, layers_of, matrix_types
from kdcli.report.text import Picture, percent


def model_pictures(pruned: Pruning) -> list[Picture]:
    """Return the pictures that a pruned model has numbers for."""
    return [p for draw in (type_map, head_map) if (p := draw(pruned))]


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
