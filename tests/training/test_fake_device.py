"""Losses and models on an accelerator: no tensor stays on the CPU, and no value is read back within a step."""

import os
import subprocess
import sys
from pathlib import Path

import fake_device


def test_a_step_of_each_loss_and_model_stays_on_its_device():
    program = Path(fake_device.__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *map(str, sys.path), str(program.parent)])}
    ran = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == fake_device.CASES
