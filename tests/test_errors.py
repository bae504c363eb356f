"""What a process leaves behind when it fails."""

import subprocess
import sys

import pytest

from kdcli.errors import last_message

WITH_HINT = "from kdcli.errors import MachineError; raise MachineError('too hot', 'open a window')"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (WITH_HINT, "kdcli.errors.MachineError: too hot"),
        (WITH_HINT.replace("open a", "allowed: a"), "kdcli.errors.MachineError: too hot"),
        ("raise ValueError('first\\nshape: 3')", "ValueError: first"),
        ("raise KeyError('layer')", "KeyError: 'layer'"),
        ("raise SystemExit('error: no such file')", "error: no such file"),
        ("raise SystemExit(3)", ""),
    ],
)
def test_the_last_message_of_a_failed_process_is_its_exception_and_not_the_hint(code, message):
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert last_message(ran.stderr) == message
