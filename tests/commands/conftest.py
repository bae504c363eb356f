"""What tests of commands share: the pictures of their reports are not drawn again for each."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Drawing is a seventh of these tests' time and tested in tests/report. Drawn is what a module's own fixtures run,
    and what a test marked `drawn` runs."""
    if "drawn" not in request.keywords:
        monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: file.write("<svg></svg>"))
