"""report.md: the report as a document that needs no browser."""

from __future__ import annotations

from kdcli.report.schema import Evaluation, Report
from kdcli.report.sections.evaluations import comparisons, confusion_listing, headline, matrix, per_class, scores, worst
from kdcli.report.sections.latency import (
    BENCHMARK,
    agreement_table,
    cell_tables,
    not_measured,
    projection_table,
    published_speedups,
    remarks,
)
from kdcli.report.sections.pruning import by_layer, by_type, density_points
from kdcli.report.sections.selection import run_table, setting_table
from kdcli.report.text import Listing, bytes_of, duration, names_of, number, plain, table
from kdcli.report.views import FEW_LABELS, overview, title

FEW_MISTAKES = 5
"""Mistakes of each evaluation that are shown."""

FEW_EVALUATIONS = 6
"""Evaluations up to which each is shown in detail."""


def markdown(report: Report) -> str:
    """report.md."""
    header, rows = overview(report)
    lines = [
        f"# {plain(title(report))}",
        "",
        f"kdcli {report.command}, {report.created}.",
        "",
        *table(header, rows),
        "",
    ]
    if report.command == BENCHMARK:
        lines += _latency(report)
    for listing in scores(report):
        lines += _section(listing)
    if (compared := comparisons(report)) is not None:
        lines += _section(compared)
    if report.selection is not None:
        lines += _section(setting_table(report.selection)) + _section(run_table(report.selection), "###")
    lines += _pruning(report)
    lines += _training(report)
    lines += _curve("Held-out loss", [(p.step, p.held_out) for p in report.curve if p.held_out])
    lines += _curve("While training", [(p.step, p.metrics) for p in report.curve if p.metrics])
    if len(report.evaluations) <= FEW_EVALUATIONS:
        for evaluation in report.evaluations:
            lines += _details(evaluation)
    else:
        lines += ["Confusion matrices, scores by class and the worst examples stand in report.html.", ""]
    if report.published and (report.quality or report.command != BENCHMARK):
        lines += ["## Published", ""]
        for row in report.published:
            values = ", ".join(f"{k} {v:g}" for k, v in row.values.items())
            lines.append(f"* {plain(f'{row.row}: {values} ({row.source})')}")
        lines.append("")
    if report.notes:
        lines += ["## Notes", "", *(f"* {plain(note)}" for note in report.notes), ""]
    facts = [f"{k} {v}" for k, v in report.versions.items()]
    lines += [plain(f"Measured on {report.environment.get('cpu')}; {', '.join(facts)}."), ""]
    return "\n".join(lines)


def _section(listing: Listing, level: str = "##") -> list[str]:
    note = [plain(listing.note), ""] if listing.note else []
    return [f"{level} {plain(listing.title)}", "", *table(listing.header, listing.rows), "", *note]


def _latency(report: Report) -> list[str]:
    """What a benchmark measured, what it did not and why, and what it only calculated."""
    lines = []
    if missing := not_measured(report):
        lines += ["## Not measured", "", *(f"* {plain(sentence)}" for sentence in missing), ""]
    for listing in cell_tables(report):
        lines += _section(listing)
    for sentence in remarks(report):
        lines += [plain(sentence), ""]
    for found in (agreement_table(report), published_speedups(report), projection_table(report)):
        lines += _section(found) if found is not None else []
    return lines


def _pruning(report: Report) -> list[str]:
    """What is kept, by type, by layer and over training."""
    lines = []
    if report.pruning and (missing := not_measured(report)):
        lines += ["## Not measured", "", *(f"* {plain(sentence)}" for sentence in missing), ""]
    if (pruned := by_type(report)) is not None:
        lines += _section(pruned)
    for one in report.pruning:
        lines += _section(by_layer(one), "###")
    return lines + _curve("Weights kept while training, in percent", density_points(report))


def _training(report: Report) -> list[str]:
    if report.training is None:
        return []
    t = report.training
    return [
        "## Training",
        "",
        f"{t.steps:,} steps, {t.tokens:,} tokens in {duration(t.seconds)} ({t.tokens_per_second:,.0f} tokens/s), "
        f"peak memory {bytes_of(t.peak_memory_bytes)}; loss {number(t.loss_first)} → {number(t.loss_last)}."
        + (f" Resumed after step {t.resumed_from_step}." if t.resumed_from_step else ""),
        "",
    ]


def _curve(heading: str, points: list[tuple[int, dict[str, float] | None]]) -> list[str]:
    """About ten of the points, the last one always."""
    if not points:
        return []
    names = names_of(values for _, values in points if values)
    shown = points if len(points) <= 12 else [*points[: -1 : max(1, len(points) // 10)], points[-1]]
    rows = [[str(step), *(number((values or {}).get(name)) for name in names)] for step, values in shown]
    return _section(Listing(heading, ["step", *names], rows))


def _details(evaluation: Evaluation) -> list[str]:
    """Confusions, classes and the worst mistakes of one model on one set."""
    found: list[str] = []
    shown, classes = matrix(evaluation), per_class(evaluation)
    if shown is not None and len(shown.labels) <= FEW_LABELS:
        found += _section(confusion_listing(shown), "###")
    if classes is not None and len(classes.rows) <= FEW_LABELS:
        found += _section(classes, "###")
    if mistakes := worst(evaluation)[:FEW_MISTAKES]:
        found += ["### Worst examples", ""]
        for m in mistakes:
            texts = "; ".join(f"“{text}”" for text in m.texts)
            found.append(
                f"* {plain(f'{m.label}, predicted {m.predicted} (badness {m.badness}, example {m.id}): {texts}')}"
            )
        found.append("")
    return [f"## {plain(f'{evaluation.model} on {headline(evaluation)}')}", "", *found] if found else []
