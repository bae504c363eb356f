"""List the sections of a report in order. Each view shows this list."""

from dataclasses import replace
from functools import partial

from kdcli.report.schema import Compression, Report
from kdcli.report.sections.accounts import accounts_section
from kdcli.report.sections.candidates import compression_section
from kdcli.report.sections.curves import training_section
from kdcli.report.sections.decision import decision_section
from kdcli.report.sections.evaluations import comparisons, details, scores
from kdcli.report.sections.grid import selection_section
from kdcli.report.sections.kept_weights import pruning_sections
from kdcli.report.sections.overview import models_section
from kdcli.report.sections.timings import (
    agreements,
    latency,
    not_measured,
    published,
    published_speedups,
)
from kdcli.report.text import Link, Picture, ReportSection, View
from kdcli.report.titles import step_title


def sections(report: Report) -> list[ReportSection]:
    """Return all sections of a report."""
    if report.compression is not None:
        return _of_compression(report, report.compression)
    return [
        models_section(report),
        not_measured(report),
        *scores(report),
        comparisons(report),
        decision_section(report),
        *([selection_section(report.selection)] if report.selection else []),
        latency(report),
        agreements(report),
        published_speedups(report),
        ReportSection("Pictures", draw=partial(_pictures, report), least=View.HTML),
        *pruning_sections(report),
        training_section(report),
        details(report),
        published(report),
        accounts_section(report),
        ReportSection("Notes", items=[(note,) for note in report.notes]),
    ]


def _of_compression(report: Report, compression: Compression) -> list[ReportSection]:
    """Show the candidates and what the chosen one lost. Everything else is folded, at the end."""
    folded = [
        models_section(report),
        *scores(report),
        latency(report),
        agreements(report),
        details(report),
        published(report),
        accounts_section(report),
    ]
    least = View.MARKDOWN
    parts = [replace(part, open=False, least=max(part.least, least)) for part in folded]
    # Only the sentences about the classes are seen at first.
    classes = decision_section(report)
    classes = replace(classes, parts=[replace(part, open=False) for part in classes.parts])
    links = [
        Link(f"{step_title(one.name)} ({one.command})", one.folder) for one in compression.steps
    ]
    return [
        compression_section(compression, report.price_per_hour),
        not_measured(report),
        comparisons(report, lost=True),
        classes,
        ReportSection("Notes", items=[(note,) for note in report.notes]),
        ReportSection("Reports of the steps", links=links, least=least),
        ReportSection("All measurements", parts=parts, least=least),
    ]


def _pictures(report: Report) -> list[Picture]:
    # Importing matplotlib takes a third of a second, and only a finished run needs it.
    from kdcli.report.charts.charts import report_pictures

    return report_pictures(report)
