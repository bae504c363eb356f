"""Threads sleep while kdcli trains, and spin briefly where it measures latency."""

import os

import pytest

from kdcli.deploy import latency
from kdcli.engine.threads import SPIN_COUNT, choose_spin_count, measuring_environment


@pytest.mark.parametrize(
    ("given", "load", "training", "measuring"),
    [
        (None, 3.1, "0", "10000"),
        (None, 2.9, "10000", "10000"),
        ("500", 9.0, "500", "500"),
    ],
)
def test_threads_sleep_on_a_busy_machine_and_spin_for_measurements_unless_the_user_chose(
    given, load, training, measuring, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    if given is None:
        monkeypatch.delenv(SPIN_COUNT, raising=False)
    else:
        monkeypatch.setenv(SPIN_COUNT, given)
    choose_spin_count()
    assert os.environ[SPIN_COUNT] == training
    # A process of a run inherits the value, and measures as the first one does.
    choose_spin_count()
    assert measuring_environment() == {**os.environ, SPIN_COUNT: measuring}


def test_the_worker_that_measures_gets_that_environment(monkeypatch):
    class Started(Exception):
        pass

    def start(*_, env, **__):
        raise Started(env[SPIN_COUNT])

    monkeypatch.setenv(SPIN_COUNT, "0")
    # Tests of verbs may have replaced this module in this process.
    monkeypatch.setattr(latency.subprocess, "Popen", start)
    protocol = latency.Protocol("cpu", min_runs=1, min_seconds=0.0)
    with pytest.raises(Started, match="10000"):
        latency.measure_latency([], protocol)
