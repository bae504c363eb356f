"""Show which rows a run read, kept and left out."""

from kdcli.report.schema import DataAccount, Report
from kdcli.report.text import ReportSection, View, filled, short

NOTE = "Rows read = rows kept + rows left out."


def accounts_section(report: Report) -> ReportSection:
    """Return the table of the accounts of all sources; the terminal shows them in the log."""
    rows = [row for account in report.accounts for row in _rows(account)]
    return filled("Data read", rows, NOTE, least=View.MARKDOWN)


def _rows(account: DataAccount) -> list[dict[str, str]]:
    """Return a row with the totals of an account, and one for each reason."""
    totals = {
        "data": short(account.source),
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
