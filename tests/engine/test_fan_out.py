"""What kdcli promises of the processes that it starts itself.

The tests start processes with `fan_out`. Instead of a verb they run a short program in a real
interpreter, or each rank is forked from the tests' process and takes the action in `ranks.py` that
the test gives it.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ranks
import torch
from forked import Child
from ranks import FOLDER

from kdcli.engine import fan_out
from kdcli.errors import Interrupted, KdcliError

pytestmark = pytest.mark.slow

BY_RANK = "import os, sys; exec(sys.argv[1 + int(os.environ['RANK'])])"
SLEEP = "import time; time.sleep(60)"


def ended_by(number):
    return f"import os; os.kill(os.getpid(), {number:d})"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(fan_out, "END_SECONDS", 2.0)


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """`fan_out` runs `python ARGUMENTS` in place of `python -P -m kdcli ARGUMENTS`."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def run(*programs):
    return fan_out.fan_out(["-c", BY_RANK, *programs], len(programs), on_cpu=True)


@pytest.mark.usefixtures("interpreter")
class TestPrograms:
    def test_a_process_that_lost_another_one_does_not_decide_the_exit_code(self):
        assert run("exit(3)", "exit(2)") == 2

    def test_a_process_that_was_asked_to_end_ends_the_others(self):
        with pytest.raises(Interrupted) as caught:
            run(SLEEP, ended_by(signal.SIGTERM))
        assert caught.value.exit_code == 130

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_crash_in_a_library_prints_where_it_was(self, rank, capfd):
        programs = [SLEEP, SLEEP]
        programs[rank] = ended_by(signal.SIGSEGV)
        with pytest.raises(KdcliError) as caught:
            run(*programs)
        assert caught.value.exit_code == 1
        assert f"process {rank} of 2 was ended by signal 11 (SIGSEGV)" in caught.value.message
        assert "Fatal Python error: Segmentation fault" in capfd.readouterr().err

    def test_after_a_stop_the_main_process_has_time_to_write_its_checkpoint(self, tmp_path):
        saved = tmp_path / "saved"
        writes = f"import time; time.sleep(2); open({str(saved)!r}, 'w').close(); exit(75)"
        assert run(writes, "exit(75)") == 75
        assert saved.exists()


def test_modules_in_the_working_directory_are_not_run(tmp_path, monkeypatch):
    for name in ("kdcli", "torch", "typer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert fan_out.fan_out(["--version"], 1, on_cpu=True) == 0


def fork_rank(command, env):
    """Fork a rank of `fan_out` that takes its action of the command line."""
    action = getattr(ranks, command[4:][int(env["RANK"])])
    return Child(lambda: ranks.perform(action), env)


@pytest.fixture
def forked(monkeypatch):
    """`fan_out` forks ranks from this process."""
    monkeypatch.setattr(fan_out, "subprocess", SimpleNamespace(Popen=fork_rank))


@pytest.fixture
def launched(forked, capfd):
    """A function that starts ranks with kdcli's launcher and waits for them."""

    def launch(*names):
        others = set(psutil.Process().children())
        try:
            code, error = fan_out.fan_out(names, len(names), on_cpu=True), None
        except KdcliError as caught:
            code, error = caught.exit_code, caught
        assert set(psutil.Process().children()) <= others, "no rank is left running"
        output = capfd.readouterr()
        messages = output.err.count("error:") + (error is not None)
        text = output.err + (error.message if error else "")
        return SimpleNamespace(code=code, messages=messages, text=text)

    return launch


@pytest.mark.parametrize(
    ("names", "code", "message"),
    [
        (("ends", "ends"), 0, ""),
        (("sums", "fails"), 2, "the data are gone"),
        (("lacks", "forever"), 3, "no memory is left"),
        (("forever", "diverges"), 4, "training diverged"),
        (("fails", "fails"), 2, "the data are gone"),
        (("forever", "breaks"), 1, "ZeroDivisionError: a bug"),
    ],
)
def test_the_exit_code_and_the_only_message_are_those_of_the_rank_that_failed(
    launched, names, code, message
):
    result = launched(*names)
    assert result.code == code, result.text
    assert result.messages == (code != 0), result.text
    assert message in result.text
    assert ("Traceback" in result.text) == (code == 1)


def test_ranks_that_stopped_with_a_checkpoint_say_so_once(launched):
    result = launched("stopped", "stopped")
    assert result.code == 75
    assert result.messages == 0
    assert result.text.count("stopped after step 1 of 2") == 1


@pytest.mark.parametrize("names", [("sums", "dies_in_step"), ("dies", "forever")])
def test_a_killed_rank_ends_the_others_within_seconds(launched, names):
    result = launched(*names)
    assert result.code == 3
    assert result.messages == 1, result.text
    killed = next(rank for rank, name in enumerate(names) if name.startswith("dies"))
    assert f"process {killed} of {len(names)}" in result.text
    assert "signal 9" in result.text
    assert "Traceback" not in result.text


@pytest.mark.parametrize("names", [("sums", "freezes"), ("freezes", "sums")])
def test_a_rank_that_stops_responding_ends_the_run(launched, names):
    result = launched(*names)
    assert result.code == 3
    assert result.messages == result.text.count("does not respond") == 1, result.text


def test_sigterm_to_the_launcher_leaves_a_checkpoint_to_resume_from(
    launched, tmp_path, monkeypatch
):
    weights = []
    for name, sigterm in (("whole", False), ("parts", True), ("parts", False)):
        folder = tmp_path / name
        monkeypatch.setenv(FOLDER, str(folder))
        if sigterm:
            threading.Thread(target=terminate_after, args=(folder / "log.jsonl", 4)).start()
        result = launched("trains", "trains")
        assert result.code == (75 if sigterm else 0), result.text
        assert result.messages == 0, result.text
        assert result.text.count("stopped after step") == sigterm
        if not sigterm:
            weights.append(torch.load(folder / "weights.pt"))
    assert "resumed after step" in result.text
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.usefixtures("forked")
def test_ranks_whose_launcher_is_killed_end_too(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "run"))
    launcher = Child(lambda: fan_out.fan_out(["trains", "trains"], 2, on_cpu=True))
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and log.read_text("utf-8").count("\n") >= 3):
        assert launcher.poll() is None
        time.sleep(0.02)
    children = psutil.Process(launcher.pid).children()
    assert len(children) == 2
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert log.read_text("utf-8").count("\n") < 13


def terminate_after(log, lines):
    """Send SIGTERM to this process, the launcher, once a training has logged some steps."""
    while not (log.exists() and log.read_text("utf-8").count("\n") >= lines):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
