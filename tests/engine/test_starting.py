"""What kdcli promises of the processes that it starts itself, whatever starts them.

Each test starts real interpreters with the launcher of `--processes`. They run `ranks.py` instead
of a verb, and each rank takes the action that the test gives it.
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
import torch
from ranks import FOLDER

from kdcli.engine import processes
from kdcli.errors import KdcliError

RANKS = str(Path(__file__).with_name("ranks.py").resolve())


@pytest.fixture
def launched(tmp_path, monkeypatch, capfd):
    """A function that starts ranks with kdcli's launcher and waits for them."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    paths = [str(folder) for folder in Path(RANKS).parents[:3]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(processes, "END_SECONDS", 5.0)

    def launch(*names):
        arguments = [RANKS, *names]
        began = time.monotonic()
        try:
            code, error = processes.fan_out(arguments, len(names), on_cpu=True), None
        except KdcliError as caught:
            code, error = caught.exit_code, caught
        output = capfd.readouterr()
        messages = output.err.count("error:") + (error is not None)
        text = output.err + (error.message if error else "")
        seconds = time.monotonic() - began
        left = [child for child in psutil.Process().children(recursive=True) if is_rank(child)]
        assert not left
        return SimpleNamespace(code=code, messages=messages, text=text, seconds=seconds)

    return launch


def is_rank(process):
    try:
        return RANKS in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
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


@pytest.mark.slow
def test_ranks_that_stopped_with_a_checkpoint_say_so_once(launched):
    result = launched("stopped", "stopped")
    assert result.code == 75
    assert result.messages == 0
    assert result.text.count("stopped after step 1 of 2") == 1


@pytest.mark.slow
@pytest.mark.parametrize("names", [("sums", "dies_in_step"), ("dies", "forever")])
def test_a_killed_rank_ends_the_others_within_seconds(launched, names):
    result = launched(*names)
    assert result.code == 3
    assert result.messages == 1, result.text
    killed = next(rank for rank, name in enumerate(names) if name.startswith("dies"))
    assert f"process {killed} of {len(names)}" in result.text
    assert "signal 9" in result.text
    assert "Traceback" not in result.text


@pytest.mark.slow
@pytest.mark.parametrize("names", [("sums", "freezes"), ("freezes", "sums")])
def test_a_rank_that_stops_responding_ends_the_run(launched, names):
    result = launched(*names)
    assert result.code == 3
    assert result.messages == result.text.count("does not respond") == 1, result.text


@pytest.mark.slow
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


def terminate_after(log, lines):
    """Send SIGTERM to this process, the launcher, once a training has logged some steps."""
    while not (log.exists() and log.read_text("utf-8").count("\n") >= lines):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
