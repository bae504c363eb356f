"""What a run prints about its progress."""

import logging
import subprocess
import sys
import threading
import time

import pytest

from kdcli.engine.progress import LINE_SECONDS, PACE_STEPS, LogRecord, Progress
from kdcli.messages import facts_once, log, log_fact, silenced, warn


@pytest.mark.parametrize("done", [0, 40])
def test_the_remaining_time_is_that_of_steps_after_the_slow_first_one(done, monkeypatch, capsys):
    clock, pace, first = [0.0], 2 * LINE_SECONDS, done + 1
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    lines = {}
    with Progress(100, done, True) as progress:
        for step in range(first, 101):
            clock[0] += 300.0 if step == first else pace
            progress.update(LogRecord(step, loss=1.0, tokens=10, seconds=1.0))
            lines[step] = capsys.readouterr().err.splitlines()[-1]
    assert not any("left" in lines[step] for step in range(first, first + PACE_STEPS))
    minutes, seconds = divmod(int(pace * (100 - first - PACE_STEPS)), 60)
    expected = f"0:{minutes:02}:{seconds:02} left"
    assert lines[first + PACE_STEPS].endswith(expected)
    assert "left" not in lines[100]


def test_a_fact_is_logged_once_in_a_run_of_several_steps(capsys):
    with facts_once():
        with silenced():
            log_fact("9 rows")
        log_fact("9 rows", "8 rows")
        log_fact("8 rows", "9 rows")
        warn("9 rows")
        warn("9 rows")
    assert capsys.readouterr().err.splitlines() == ["9 rows", "8 rows", "warning: 9 rows"]
    for _ in range(2):
        log_fact("9 rows")
    assert capsys.readouterr().err.splitlines() == ["9 rows", "9 rows"]


def test_silence_is_a_thread_s_own(caplog):
    """Two threads that overlap, and a logger that passes warnings alone."""
    caplog.set_level("INFO", "kdcli")
    within, ended = threading.Event(), threading.Event()

    def other():
        with silenced():
            within.set()
            ended.wait(10)
            log("hidden")

    thread = threading.Thread(target=other)
    with silenced():
        thread.start()
        within.wait(10)
    log("shown")
    ended.set()
    thread.join()
    log("shown later")
    assert caplog.messages == ["shown", "shown later"]
    caplog.set_level("WARNING", "kdcli")
    with facts_once():
        for _ in range(2):
            warn("1 row is empty")
    assert caplog.messages[2:] == ["warning: 1 row is empty"]


PROGRAM = """
import logging, sys
import kdcli

def trim(name):
    print(name, file=sys.stderr, flush=True)
    kdcli.trim("demo", data="demo", output_dir=f"{sys.argv[1]}/{name}")

log = logging.getLogger("kdcli")
trim("printed")
log.setLevel(logging.ERROR)
trim("silenced")
log.setLevel(logging.INFO)
logging.basicConfig(format="%(name)s has %(levelname)s", level=logging.INFO)
trim("routed")
"""


def test_a_program_silences_and_routes_messages(tmp_path):
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    stderr = subprocess.run(program, capture_output=True, text=True, check=True).stderr
    printed, rest = stderr.removeprefix("printed\n").split("silenced\n")
    silenced, routed = rest.split("routed\n")
    assert "tokens" in printed
    assert "kdcli has INFO" not in printed
    assert silenced == ""
    assert set(routed.splitlines()) == {"kdcli has INFO"}


def test_messages_have_a_level(caplog):
    with caplog.at_level(logging.INFO, "kdcli"):
        log("9 rows")
        warn("1 row is empty")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "9 rows"),
        ("WARNING", "warning: 1 row is empty"),
    ]
