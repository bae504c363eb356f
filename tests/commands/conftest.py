"""What tests of commands share: the pictures of their reports are not drawn again for each."""

import pytest

from kdcli.report.drawing import Picture


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Pictures take a good part of these tests' time and are tested in tests/report. Drawn is what a module's own
    fixtures run, and what a test marked `drawn` runs."""
    if "drawn" not in request.keywords:
        stub = [Picture("<svg></svg>", "a picture")]
        monkeypatch.setattr("kdcli.report.build.pictures", lambda report: stub)
        monkeypatch.setattr("kdcli.report.build.of_model", lambda pruned: stub)
