"""Show which rows a run read, kept and left out, and how it read their labels."""

from dataclasses import replace

from kdcli.data.accounts import RowAccount
from kdcli.report.schema import Report
from kdcli.report.sections.evaluations import set_name
from kdcli.report.text import ReportSection, View, filled
from kdcli.types import NAMED_BY, LabelAccount

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
