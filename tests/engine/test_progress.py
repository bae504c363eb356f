"""What a run prints about its progress."""

import io

import pytest
from rich.console import Console

from kdcli.engine import progress as shown
from kdcli.engine.progress import LINE_SECONDS, PACE_STEPS, LogRecord, Progress


@pytest.fixture(params=[False, True], ids=["lines", "bar"])
def run(request, monkeypatch):
    """Runs 100 steps, each as long as `seconds_of` says, and returns the remaining time after each,
    as it is shown."""
    clock = [1000.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        Progress, "console", Console(file=io.StringIO(), force_terminal=request.param, width=200)
    )

    def go(seconds_of, done=0):
        found = {}
        with Progress(100, done, True) as progress:
            clock[0] += 500.0  # Something before the first step, such as a held-out pass
            for step in range(done + 1, 101):
                clock[0] += seconds_of(step)
                progress.update(LogRecord(step, loss=1.0, tokens=10, seconds=1.0))
                said = progress.console.file.getvalue()
                found[step] = (
                    progress.bar.tasks[0].fields["left"] if progress.live else said.splitlines()[-1]
                )
        return found

    return go


@pytest.mark.parametrize("done", [0, 40])
def test_the_remaining_time_is_that_of_steps_after_the_slow_first_one(run, done):
    found = run(lambda step: 300.0 if step == done + 1 else 2 * LINE_SECONDS, done)
    first = done + 1
    assert not any("left" in found[step] for step in range(first, first + PACE_STEPS))
    seconds = int(2 * LINE_SECONDS * (100 - first - PACE_STEPS))
    expected = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
    assert found[first + PACE_STEPS].endswith(expected)
    assert "left" not in found[100]


def test_a_fact_is_logged_once_in_a_run_of_several_steps(capsys):
    with Progress.facts_once():
        Progress.console.quiet = True
        Progress.log_fact("9 rows")
        Progress.console.quiet = False
        Progress.log_fact("9 rows", "8 rows")
        Progress.log_fact("8 rows", "9 rows")
    assert capsys.readouterr().err.splitlines() == ["9 rows", "8 rows"]
    for _ in range(2):
        Progress.log_fact("9 rows")
    assert capsys.readouterr().err.splitlines() == ["9 rows", "9 rows"]
