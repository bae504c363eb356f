"""Show the cost of a training, and the curves of a run as tables."""

from collections.abc import Mapping, Sequence

from kdcli.report.schema import CurvePoint, Report
from kdcli.report.text import ReportSection, View, bytes_of, duration, filled, names_in, number

MAX_CURVE_ROWS = 12


def training_section(report: Report) -> ReportSection:
    """Show the cost of the training, and its curves as tables."""
    held_out = [(p.step, held_out_terms(p)) for p in report.curve if p.held_out]
    metrics = [(p.step, p.metrics) for p in report.curve if p.metrics]
    sentences = []
    if (t := report.training) is not None and not t.steps:
        sentences.append("The student was made from its teacher and not trained.")
    elif t is not None:
        resumed = t.resumed_from_step
        sentences.append(
            f"{t.steps:,} steps, {t.tokens:,} tokens in {duration(t.seconds)} "
            f"({t.tokens_per_second:,.0f} tokens/s), "
            f"peak memory {bytes_of(t.peak_memory_bytes)}; "
            f"loss {number(t.loss_first)} → {number(t.loss_last)}."
            + (f" Resumed after step {resumed:,}." if resumed else "")
        )
    parts = [curve_section("Held-out loss", held_out), curve_section("While training", metrics)]
    return ReportSection("Training", sentences=sentences, parts=parts, least=View.MARKDOWN)


def held_out_terms(point: CurvePoint) -> dict[str, float]:
    """Name a held-out term by itself, or `MODEL/TERM` if there are several models."""
    models = point.held_out or {}
    return {
        term if len(models) == 1 else f"{model}/{term}": value
        for model, terms in models.items()
        for term, value in terms.items()
    }


def curve_section(title: str, points: Sequence[tuple[int, Mapping[str, float]]]) -> ReportSection:
    """Show about ten of the points, always with the last one."""
    chosen = points
    if len(points) > MAX_CURVE_ROWS:
        chosen = [*points[: -1 : max(1, len(points) // 10)], points[-1]]
    names = names_in(values for _, values in points)
    rows = [
        {"step": f"{step:,}"} | {name: number(values.get(name)) for name in names}
        for step, values in chosen
    ]
    return filled(title, rows, least=View.MARKDOWN, open=False)
