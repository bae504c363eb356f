"""Threads sleep while kdcli trains, and spin briefly where it measures latency."""

import os
import subprocess

import pytest

from kdcli.deploy import latency
from kdcli.engine.threads import SPIN_COUNT, let_threads_sleep, measuring_environment


@pytest.mark.parametrize(
    ("given", "training", "measuring"), [(None, "0", "10000"), ("500", "500", "500")]
)
def test_commands_sleep_and_measurements_spin_unless_the_user_chose(
    given, training, measuring, monkeypatch
):
    if given is None:
        monkeypatch.delenv(SPIN_COUNT, raising=False)
    else:
        monkeypatch.setenv(SPIN_COUNT, given)
    let_threads_sleep()
    assert os.environ[SPIN_COUNT] == training
    # A process of a run inherits the value, and measures as the first one does.
    let_threads_sleep()
    assert measuring_environment() == {**os.environ, SPIN_COUNT: measuring}


def test_the_worker_that_measures_gets_that_environment(monkeypatch):
    class Started(Exception):
        pass

    def start(*_, env, **__):
        raise Started(env[SPIN_COUNT])

    monkeypatch.setenv(SPIN_COUNT, "0")
    monkeypatch.setattr(subprocess, "Popen", start)
    protocol = latency.Protocol("cpu", min_runs=1, min_seconds=0.0)
    with pytest.raises(Started, match="10000"):
        latency.measure_latency([], protocol)
