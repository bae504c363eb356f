"""Threads sleep or spin briefly while kdcli trains, and spin briefly where it measures latency."""

import os

import pytest

from kdcli.engine.threads import SPIN_COUNT, choose_spin_count, measuring_environment


@pytest.mark.parametrize(
    ("given", "training", "measuring"),
    [(None, {"0", "10000"}, "10000"), ("0", {"0"}, "10000"), ("500", {"500"}, "500")],
)
def test_threads_spin_for_measurements_unless_the_user_chose(
    given, training, measuring, monkeypatch
):
    monkeypatch.delenv(SPIN_COUNT, raising=False)
    if given is not None:
        monkeypatch.setenv(SPIN_COUNT, given)
    choose_spin_count()
    assert os.environ[SPIN_COUNT] in training
    # A process of a run inherits the value, and measures as the first one does.
    choose_spin_count()
    assert measuring_environment() == {**os.environ, SPIN_COUNT: measuring}
