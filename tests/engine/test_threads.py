"""The threads of PyTorch on a CPU: how many, and how they wait."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from kdcli.engine.threads import WAIT_POLICY, few_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("models", "threads"),
    [
        ([nn.Linear(128, 512), nn.Linear(8, 8)], 1),
        ([nn.Linear(8, 8), nn.Linear(128, 513)], 3),
        ([nn.Embedding(5000, 128)], 1),
    ],
)
def test_small_layers_use_one_thread(models: list[nn.Module], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with few_threads(CPU, models):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError), few_threads(CPU, models):
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "own", "measured"),
    [(None, "PASSIVE", None), ("ACTIVE", "ACTIVE", "ACTIVE")],
)
def test_a_command_lets_threads_sleep_and_measures_without_that(
    given: str | None, own: str, measured: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != WAIT_POLICY}
    environment |= {} if given is None else {WAIT_POLICY: given}
    program = (
        "import os\n"
        "from kdcli.engine.threads import *\n"
        "let_threads_sleep()\n"
        f"print(os.environ['{WAIT_POLICY}'], environment_without_policy().get('{WAIT_POLICY}'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [own, str(measured)]
