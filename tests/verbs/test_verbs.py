"""Verbs that another verb runs: codes, messages, signals, and what happens when their server falls."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from kdcli.errors import MachineError, Stopped
from kdcli.verbs.compress.verbs import Verbs


def test_verbs_are_run_with_their_codes_outputs_and_messages(capfd):
    with closing(Verbs()) as verbs:
        code, output, error = verbs.run(["distill", "--to", "2x16"])
        assert (code, output) == (2, "")
        assert error.startswith("no teacher given")
        assert "no teacher given" in capfd.readouterr().err
        code, output, error = verbs.run(["--version"])
        assert (code, output.split()[0], error) == (0, "kdcli", "")
        server = verbs._process
    assert server.returncode == 0


def endless(folder):
    """A training that is never done, and whether it has begun."""
    train = ["distill", "demo", "--to", "1x32", "--assistant", "none", "--quiet", "-o", str(folder)]
    train += ["--data", "demo", "--max-steps", "5000", "--set", "measure.latency=false"]
    log = folder / "log.jsonl"
    return train, lambda: log.exists() and log.stat().st_size > 0


def test_a_verb_is_asked_to_stop_with_a_checkpoint(tmp_path):
    train, begun = endless(tmp_path / "run")
    with closing(Verbs()) as verbs:
        assert verbs.run(train, until=begun)[0] == Stopped.exit_code
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_killed_verb_or_server_is_a_fault_of_the_machine(tmp_path):
    train, begun = endless(tmp_path / "run")
    with closing(Verbs()) as verbs:
        verbs.run(["--version"])
        server = verbs._process

        def kill():
            if not begun():
                return False
            (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            return True

        with pytest.raises(MachineError, match="was ended by signal 9"):
            verbs.run(train, until=kill)
        server.kill()
        server.wait()
        time.sleep(0.1)
        with pytest.raises(MachineError, match="the process that starts verbs was ended"):
            verbs.run(["--version"])
        # The next one begins anew.
        assert verbs.run(["--version"])[0] == 0
