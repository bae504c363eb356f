"""The threads of PyTorch on a CPU. This module loads no large library.

OpenMP threads that wait for work spin by default. If other programs use the cores as well, a
training step then takes several times as long, and most of the processor time is spent waiting.
docs/results.md has the measurements.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

WAIT_POLICY = "OMP_WAIT_POLICY"
SMALL = 128 * 512
"""Maximum number of elements of a linear layer that one thread multiplies."""

_is_ours = False


def let_threads_sleep() -> None:
    """Let the threads of this process sleep while they wait, unless the user chose a policy.

    It has no effect after torch has been imported.
    """
    global _is_ours
    if WAIT_POLICY not in os.environ:
        os.environ[WAIT_POLICY] = "PASSIVE"
        _is_ours = True


def environment_without_policy() -> dict[str, str]:
    """Return the environment for a process that measures latency: threads wait as users have it."""
    environment = dict(os.environ)
    if _is_ours:
        environment.pop(WAIT_POLICY, None)
    return environment


@contextlib.contextmanager
def few_threads(device: torch.device, models: Iterable[nn.Module]) -> Iterator[None]:
    """Use one thread if no linear layer of the models is large enough to share."""
    import torch
    from torch import nn

    layers = (m for model in models for m in model.modules() if isinstance(m, nn.Linear))
    largest = max((layer.weight.numel() for layer in layers), default=0)
    before = torch.get_num_threads()
    if device.type == "cpu" and largest <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
