"""Fixtures over `reports.py`."""

from __future__ import annotations

import pytest
from reports import hostile_report, plain_report, report_values

from kdcli.report.schema import Report


@pytest.fixture
def values() -> dict[str, object]:
    return report_values()


@pytest.fixture
def report() -> Report:
    return plain_report()


@pytest.fixture
def hostile() -> Report:
    return hostile_report()
