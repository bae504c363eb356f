"""A fixture for each kind of report."""

import pytest
import reports as r

for kind, make in r.KINDS.items():
    globals()[kind] = pytest.fixture(name=kind)(lambda make=make: r.made(make()))


@pytest.fixture
def values() -> dict[str, object]:
    """The values of the plain report, to be changed."""
    return r.report_values()
