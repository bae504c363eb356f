"""How long the threads of PyTorch spin while they wait. This module loads no large library.

A thread that spins on a busy core keeps the thread that it waits for from running.
docs/evidence/speed.md has the measurements.
"""

import os

SPIN_COUNT = "GOMP_SPINCOUNT"
SLEEP, SPIN_BRIEFLY = "0", "10000"
BUSY = 0.75
"""Programs that run or wait, per core, from which on a machine counts as busy."""


def choose_spin_count() -> None:
    """Make waiting threads sleep on a busy machine, and spin briefly on another one.

    A spin count from the user is kept. Call this before torch is imported.
    """
    os.environ.setdefault(SPIN_COUNT, SLEEP if is_busy() else SPIN_BRIEFLY)


def is_busy() -> bool:
    """Return whether other programs used most of the cores during the last minute."""
    cores = os.cpu_count() or 1
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * cores


def measuring_environment() -> dict[str, str]:
    """Return the environment of a process that measures latency.

    Its threads spin briefly, because waking them takes a part of the time of a small model.
    """
    is_ours = os.environ.get(SPIN_COUNT) == SLEEP
    return {**os.environ, SPIN_COUNT: SPIN_BRIEFLY} if is_ours else dict(os.environ)
