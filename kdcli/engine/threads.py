"""How long the threads of PyTorch spin while they wait. This module loads no large library.

A thread that spins on a busy core keeps the thread that it waits for from running. docs/results.md
has the measurements.
"""

import os

SPIN_COUNT = "GOMP_SPINCOUNT"
TRAINING, MEASURING = "0", "10000"
"""The spin counts of a command, and of the processes in which it measures latency."""


def let_threads_sleep() -> None:
    """Make waiting threads sleep, unless the user chose a spin count. Call this before torch."""
    os.environ.setdefault(SPIN_COUNT, TRAINING)


def measuring_environment() -> dict[str, str]:
    """Return the environment of a process that measures latency.

    Its threads spin briefly, because waking them takes a part of the time of a small model.
    """
    is_ours = os.environ.get(SPIN_COUNT) == TRAINING
    return {**os.environ, SPIN_COUNT: MEASURING} if is_ours else dict(os.environ)
