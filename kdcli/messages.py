"""Messages of a run, for the logger `kdcli`. Only the main process logs them.

The command line prints them on stderr (`kdcli.engine.progress`). A program that calls kdcli, a
notebook and pytest route, silence and format them as those of any other logger. The processes of a
pool print theirs on stderr.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
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


class Fact(str):
    """A fact with a subject, such as the repeated texts of a file.

    Parts of the data and copies of a model give facts that only differ in numbers and names. A run
    logs and reports the first fact about each subject.
    """

    subject: str

    def __new__(cls, text: str, subject: str = "") -> Fact:
        """Create a fact."""
        fact = super().__new__(cls, text)
        fact.subject = subject
        return fact


def _subject(message: str) -> str:
    return message.subject if isinstance(message, Fact) else message


def named(name: str, note: str) -> str:
    """Put the name of a model in front of a note on it."""
    text = f"{name}: {note}"
    return Fact(text, note.subject) if isinstance(note, Fact) else text


def one_of_each(messages: Iterable[str]) -> list[str]:
    """Return the first of all messages about each subject."""
    return list({_subject(message): message for message in reversed(list(messages))}.values())[::-1]


def log_fact(*messages: str) -> None:
    """Log facts about data or a model, each subject only once within `facts_once`."""
    known = _facts.get()
    for message in messages:
        subject = _subject(message)
        if known is None or subject not in known:
            log(message)
        # A silenced reader is followed by another one, which logs the fact.
        if known is not None and is_logged(message):
            known.add(subject)


def warn(*messages: str) -> None:
    """Log warnings, each subject only once within `facts_once`.

    A fact about the same subject that is no warning hides no warning.
    """
    log_fact(*(Fact(WARNING + message, WARNING + _subject(message)) for message in messages))


@contextmanager
def facts_once(known: set[str] | None = None) -> Iterator[set[str]]:
    """Log equal facts only once, because several steps of a run read the same data.

    Inside another `facts_once`, facts are compared with the outer one's too.

    Args:
        known: The facts that another process has logged.

    Yields:
        The facts that were logged so far.
    """
    outer = _facts.get()
    facts = known if known is not None else set() if outer is None else outer
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


def time_left(seconds: float) -> str:
    """Write the remaining time of a run: `0:01:30 left`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} left"
