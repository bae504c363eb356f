"""Density and regulariser over the steps of a run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.pruners.pruner import kept_share, progress, ramp


def test_the_ramp_holds_still_at_both_ends():
    assert [ramp(t, 100, first=0.1, last=0.2) for t in (0, 10, 45, 80, 100)] == pytest.approx([0, 0, 0.5, 1, 1])
    # Nothing goes before there is a gradient.
    assert [ramp(t, 100, last=1.0) for t in (0, 1)] == [0, 1]
    assert [ramp(t, 10, first=0.5, last=0.5) for t in (4, 5)] == [0, 1]


def test_cubic_and_linear_densities_are_the_formulas():
    assert kept_share(0.4, 0.1, "cubic") == pytest.approx(0.1 + 0.9 * 0.6**3)
    assert kept_share(0.4, 0.1, "linear") == pytest.approx(0.1 + 0.9 * 0.6)
    assert progress(0.4, "cubic") == pytest.approx(1 - 0.6**3)
    assert [kept_share(p, 0.03, "cubic") for p in (0.0, 1.0)] == [1.0, 0.03]


@settings(max_examples=40)
@given(
    steps=st.integers(1, 50),
    first=st.floats(0, 0.5),
    last=st.floats(0, 0.5),
    final=st.floats(0.01, 1),
    shape=st.sampled_from(["cubic", "linear"]),
)
def test_density_never_rises_and_ends_at_the_one_asked_for(steps, first, last, final, shape):
    found = [kept_share(ramp(t, steps, first=first, last=last), final, shape) for t in range(steps + 1)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == final
    assert found[0] <= 1
