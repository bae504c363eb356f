"""List the sections of a report in order. Each view shows this list."""

from dataclasses import replace
from functools import partial

from kdcli.data.accounts import RowAccount
from kdcli.report.schema import Compression, Report
from kdcli.report.sections.candidates import compression_section
from kdcli.report.sections.curves import training_section
from kdcli.report.sections.decision import decision_section
from kdcli.report.sections.evaluations import comparisons, details, scores, set_name
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
from kdcli.report.text import Link, Picture, ReportSection, View, filled
from kdcli.report.titles import step_title
from kdcli.types import NAMED_BY, LabelAccount


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


MOST_NAMES = 12
MAPPED_BY = {
    "name": "name",
    "number": "number, because data and model share no names",
    "order": "order, because the model's classes have no names",
    "none": "no labels are read",
}
NOTE = "Rows read = rows kept + rows left out."


def accounts_section(report: Report) -> ReportSection:
    """Return the table of the accounts of all sources; the terminal shows them in the log."""
    rows = [row for account in report.accounts for row in _rows(account)]
    data = filled("Data read", rows, NOTE, least=View.MARKDOWN)
    return replace(data, parts=[_classes(report)])


def _classes(report: Report) -> ReportSection:
    """Return the table of the classes of each task."""
    by_task = {
        set_name(one.task, one.set): _row_of_classes(one.classes)
        for one in report.evaluations
        if one.classes is not None
    }
    rows = [{"task": task} | row for task, row in by_task.items()]
    return filled("Classes", rows, least=View.MARKDOWN)


def _row_of_classes(classes: LabelAccount) -> dict[str, str]:
    names = [f"{number} {name}" for number, name in enumerate(classes.names[:MOST_NAMES])]
    more = f" ... {len(classes.names)} in all" if len(classes.names) > MOST_NAMES else ""
    return {
        "classes": ", ".join(names) + more,
        "named by": NAMED_BY[classes.names_from],
        "labels read by": MAPPED_BY[classes.mapping],
    }


def _rows(account: RowAccount) -> list[dict[str, str]]:
    """Return a row with the totals of an account, and one for each reason."""
    totals = {
        "data": account.source,
        "counted": account.rows,
        "read": f"{account.read:,}",
        "kept": f"{account.kept:,}",
    }
    reasons = [
        {"left out": f"{one.count:,}", "reason": one.reason, "first": one.first}
        for one in account.left_out
    ]
    first, *others = reasons or [{}]
    return [totals | first, *others]
