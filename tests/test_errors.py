"""What a process leaves behind when it fails."""

import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from kdcli.errors import first_problem, last_message

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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.5, 2], "item 1 of the list must be a whole number, got 1.5"),
        ([1, 2, 3], "must have at most 2 items, got 3"),
        ([1], "item 2 of the list is missing"),
    ],
)
def test_a_problem_of_a_json_file_says_once_what_was_given(values, message):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(tuple[int, int]).validate_python(values)
    assert first_problem(caught.value, values) == message
