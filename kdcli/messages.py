"""Messages of a run, for the logger `kdcli`. Only the main process logs them.

The command line prints them on stderr (`kdcli.engine.progress`). A program that calls kdcli, a
notebook and pytest route, silence and format them as those of any other logger. The processes of a
pool print theirs on stderr.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LOG = logging.getLogger("kdcli")
WARNING = "warning: "
"""The beginning of a message of level WARNING. All others have level INFO."""
_facts: ContextVar[set[str] | None] = ContextVar("facts", default=None)
"""The facts that were logged since `facts_once` was entered."""
_silent: ContextVar[bool] = ContextVar("silent", default=False)
"""Whether nothing is logged. Other threads have their own value."""
LOG.addFilter(lambda record: not _silent.get())


def slurm_tasks() -> int:
    """Return the number of processes that `srun` started.

    An `sbatch` script is one process for any allocation.
    """
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def is_main() -> bool:
    """Whether this is the main process, which alone may print and write."""
    default = os.environ.get("SLURM_PROCID", "0") if slurm_tasks() > 1 else "0"
    return int(os.environ.get("RANK", default)) == 0


def is_logged(message: str = "") -> bool:
    """Whether a message of the command line, or of a program's logger, is shown."""
    return not _silent.get() and LOG.isEnabledFor(_level(message))


def _level(message: str) -> int:
    return logging.WARNING if message.startswith(WARNING) else logging.INFO


def log(*messages: str) -> None:
    """Log messages, in the main process only."""
    for message in messages if is_main() else ():
        LOG.log(_level(message), "%s", message)


def log_fact(*messages: str) -> None:
    """Log facts about data or a model, each only once within `facts_once`."""
    known = _facts.get()
    for message in messages:
        if known is None or message not in known:
            log(message)
        # A silenced reader is followed by another one, which logs the fact.
        if known is not None and is_logged(message):
            known.add(message)


def warn(*messages: str) -> None:
    """Log warnings, each only once within `facts_once`."""
    log_fact(*(WARNING + message for message in messages))


@contextmanager
def facts_once(known: set[str] | None = None) -> Iterator[set[str]]:
    """Log equal facts only once, because several steps of a run read the same data.

    Args:
        known: The facts that another process has logged.

    Yields:
        The facts that were logged so far.
    """
    facts = set() if known is None else known
    token = _facts.set(facts)
    try:
        yield facts
    finally:
        _facts.reset(token)


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress the messages of this thread about work that is repeated later."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)
