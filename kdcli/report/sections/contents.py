"""The sections of a report, in order; each view shows this list."""

from collections.abc import Sequence
from functools import partial

from kdcli.report.schema import Pruning, Report
from kdcli.report.sections.compression import compression_section
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
from kdcli.report.text import Picture, Section, Table, View, bytes_of, duration, names_of, number

FEW_PRUNED = 3  # Pruned models up to which each is unfolded


def sections(report: Report) -> list[Section]:
    """All that a report shows."""
    return [
        *([compression_section(c)] if (c := report.compression) else []),
        models_section(report),
        *not_measured(report),
        *scores(report),
        *comparisons(report),
        *([selection_section(report.selection)] if report.selection else []),
        *latency(report),
        *agreements(report),
        *published_speedups(report),
        Section("Pictures", draw=partial(_pictures, report), least=View.HTML),
        *_pruned(report),
        *_training(report),
        *details(report),
        *published(report),
        *([Section("Notes", items=[(note,) for note in report.notes])] if report.notes else []),
    ]


def _pictures(shown: Report | Pruning) -> list[Picture]:
    # Imported here, since matplotlib takes a third of a second and a run is drawn at its end.
    from kdcli.report.charts import charts, pruning

    return charts.pictures(shown) if isinstance(shown, Report) else pruning.model_pictures(shown)


def _pruned(report: Report) -> list[Section]:
    """What is kept: by type of every model, by layer and in pictures of each, over training."""
    parts, few = [], len(report.pruning) <= FEW_PRUNED
    for p in report.pruning:
        title = f"{p.model}: weights kept by layer and type, in percent"
        parts.append(
            Section(title, by_layer(p), draw=partial(_pictures, p), least=View.MARKDOWN, open=few)
        )
    parts += _curve("Weights kept while training, in percent", density_points(report))
    return (
        [Section("Weights kept, in percent", by_type(report), parts=parts)]
        if report.pruning
        else []
    )


def _training(report: Report) -> list[Section]:
    """What the training took, and its curves as tables."""
    parts = _curve("Held-out loss", [(p.step, p.held_out) for p in report.curve if p.held_out])
    parts += _curve("While training", [(p.step, p.metrics) for p in report.curve if p.metrics])
    sentences = []
    if (t := report.training) is not None:
        sentences.append(
            f"{t.steps:,} steps, {t.tokens:,} tokens in {duration(t.seconds)} ({t.tokens_per_second:,.0f} tokens/s), "
            f"peak memory {bytes_of(t.peak_memory_bytes)}; loss {number(t.loss_first)} → {number(t.loss_last)}."
            + (f" Resumed after step {t.resumed_from_step:,}." if t.resumed_from_step else "")
        )
    shown = [Section("Training", sentences=sentences, parts=parts, least=View.MARKDOWN)]
    return shown if sentences or parts else []


def _curve(title: str, points: Sequence[tuple[int, dict[str, float] | None]]) -> list[Section]:
    """About ten of the points, the last one always."""
    names = names_of(values for _, values in points if values)
    shown = points if len(points) <= 12 else [*points[: -1 : max(1, len(points) // 10)], points[-1]]
    rows = [
        [f"{step:,}", *(number((values or {}).get(name)) for name in names)]
        for step, values in shown
    ]
    return (
        [Section(title, Table(["step", *names], rows), least=View.MARKDOWN, open=False)]
        if rows
        else []
    )
