"""What tests of commands share: pictures of reports are not drawn again for each, and latency is measured by a process
forked from one that has imported what it needs; tests/bench starts a real one."""

from __future__ import annotations

import pytest
from forked import workers_are_forked

from kdcli.report.drawing import Picture


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Pictures take a good part of these tests' time and are tested in tests/report. Drawn is what a module's own
    fixtures run, and what a test marked `drawn` runs."""
    if "drawn" not in request.keywords:
        stub = [Picture("<svg></svg>", "a picture")]
        monkeypatch.setattr("kdcli.report.build.pictures", lambda report: stub)
        monkeypatch.setattr("kdcli.report.build.of_model", lambda pruned: stub)


@pytest.fixture(autouse=True, scope="package")
def forked_worker():
    """Of the modules' own fixtures too."""
    with pytest.MonkeyPatch.context() as patch:
        workers_are_forked(patch)
        yield
