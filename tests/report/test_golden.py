"""Every view of a report of every verb, word for word.

The expected texts are in golden/. After a wanted change, write them again with
`python tests/report/reports.py`, and read the difference.
"""

import pytest
import reports

pytestmark = pytest.mark.slow


# The names of the others are hostile, and checked elsewhere.
KINDS = [kind for kind in reports.KINDS if "hostile" not in kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_view_is_as_before(kind):
    texts = reports.written(kind)
    assert set(texts) == {file.name for file in reports.GOLDEN.glob(f"{kind}.*")}
    for name, text in texts.items():
        assert text.splitlines() == (reports.GOLDEN / name).read_text("utf-8").splitlines(), name
