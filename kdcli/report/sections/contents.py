"""List the sections of a report in order. Each view shows this list."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kdcli.report.schema import Compression, CurvePoint, Pruning, Report
from kdcli.report.sections.compression import compression_section
from kdcli.report.sections.decision import decision_sections
from kdcli.report.sections.evaluations import comparisons, details, scores
from kdcli.report.sections.latency import (
    agreements,
    latency,
    not_measured,
    published,
    published_speedups,
)
from kdcli.report.sections.overview import models_section
from kdcli.report.sections.pruning import by_layer, by_type, density_points
from kdcli.report.sections.selection import selection_section
from kdcli.report.text import (
    Link,
    Picture,
    ReportSection,
    ReportTable,
    View,
    bytes_of,
    duration,
    names_in,
    number,
)
from kdcli.report.titles import step_title

MAX_OPEN_PRUNED = 3  # with more pruned models, their tables are closed in HTML
MAX_CURVE_ROWS = 12


def sections(report: Report) -> list[ReportSection]:
    """Return all sections of a report."""
    if report.compression is not None:
        return _of_compression(report, report.compression)
    return [
        models_section(report),
        *not_measured(report),
        *scores(report),
        *comparisons(report),
        *decision_sections(report),
        *([selection_section(report.selection)] if report.selection else []),
        *latency(report),
        *agreements(report),
        *published_speedups(report),
        ReportSection("Pictures", draw=partial(_pictures, report), least=View.HTML),
        *_pruned(report),
        *_training(report),
        *details(report),
        *published(report),
        *_notes(report),
    ]


def _of_compression(report: Report, compression: Compression) -> list[ReportSection]:
    """Show the candidates and what the chosen one lost. Everything else is folded, at the end."""
    folded = [
        models_section(report),
        *scores(report),
        *latency(report),
        *agreements(report),
        *details(report),
        *published(report),
    ]
    least = View.MARKDOWN
    parts = [replace(part, open=False, least=max(part.least, least)) for part in folded]
    return [
        compression_section(compression, report.price_per_hour),
        *not_measured(report),
        *comparisons(report, lost=True),
        *map(_folded, decision_sections(report)),
        *_notes(report),
        *_steps(compression),
        ReportSection("All measurements", parts=parts, least=least),
    ]


def _folded(section: ReportSection) -> ReportSection:
    """Close the parts of a section in HTML, so that only its sentences are seen at first."""
    return replace(section, parts=[replace(part, open=False) for part in section.parts])


def _notes(report: Report) -> list[ReportSection]:
    if not report.notes:
        return []
    return [ReportSection("Notes", items=[(note,) for note in report.notes])]


def _steps(compression: Compression) -> list[ReportSection]:
    """Link to the reports of the steps."""
    links = [
        Link(f"{step_title(one.name)} ({one.command})", one.folder) for one in compression.steps
    ]
    if not links:
        return []
    return [ReportSection("Reports of the steps", links=links, least=View.MARKDOWN)]


def _pictures(content: Report | Pruning) -> list[Picture]:
    """Draw a report, or one of its pruned models."""
    # Importing matplotlib takes a third of a second, and only a finished run needs it.
    from kdcli.report.charts import charts, pruning

    if isinstance(content, Report):
        return charts.report_pictures(content)
    return pruning.model_pictures(content)


def _pruned(report: Report) -> list[ReportSection]:
    """Show which weights are kept: by type, by layer, in pictures, and while training."""
    if not report.pruning:
        return []
    parts, is_open = [], len(report.pruning) <= MAX_OPEN_PRUNED
    for p in report.pruning:
        title = f"{p.model}: weights kept by layer and type, in percent"
        draw = partial(_pictures, p)
        parts.append(
            ReportSection(title, by_layer(p), draw=draw, least=View.MARKDOWN, open=is_open)
        )
    parts += _curve("Weights kept while training, in percent", density_points(report))
    return [ReportSection("Weights kept, in percent", by_type(report), parts=parts)]


def _training(report: Report) -> list[ReportSection]:
    """Show the cost of the training, and its curves as tables."""
    held_out = [(p.step, held_out_terms(p)) for p in report.curve if p.held_out]
    parts = _curve("Held-out loss", held_out)
    parts += _curve("While training", [(p.step, p.metrics) for p in report.curve if p.metrics])
    sentences = []
    if (t := report.training) is not None and not t.steps:
        sentences.append("The student was made from its teacher and not trained.")
    elif t is not None:
        sentence = (
            f"{t.steps:,} steps, {t.tokens:,} tokens in {duration(t.seconds)} "
            f"({t.tokens_per_second:,.0f} tokens/s), "
            f"peak memory {bytes_of(t.peak_memory_bytes)}; "
            f"loss {number(t.loss_first)} → {number(t.loss_last)}."
        )
        if t.resumed_from_step:
            sentence += f" Resumed after step {t.resumed_from_step:,}."
        sentences.append(sentence)
    if not sentences and not parts:
        return []
    return [ReportSection("Training", sentences=sentences, parts=parts, least=View.MARKDOWN)]


def held_out_terms(point: CurvePoint) -> dict[str, float]:
    """Name a held-out term by itself, or `MODEL/TERM` if there are several models."""
    models = point.held_out or {}
    return {
        term if len(models) == 1 else f"{model}/{term}": value
        for model, terms in models.items()
        for term, value in terms.items()
    }


def _curve(
    title: str, points: Sequence[tuple[int, dict[str, float] | None]]
) -> list[ReportSection]:
    """Show about ten of the points, always with the last one."""
    if not points:
        return []
    names = names_in(values for _, values in points if values)
    chosen = list(points)
    if len(points) > MAX_CURVE_ROWS:
        chosen = [*points[: -1 : max(1, len(points) // 10)], points[-1]]
    rows = [
        [f"{step:,}", *(number((values or {}).get(name)) for name in names)]
        for step, values in chosen
    ]
    return [
        ReportSection(title, ReportTable(["step", *names], rows), least=View.MARKDOWN, open=False)
    ]
