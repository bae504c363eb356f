"""Named tasks: one file a benchmark family with one row a task; the row's name is the name that
`--task` takes."""

import importlib
import pkgutil

from kdcli.errors import UsageError, did_you_mean
from kdcli.types import Task

OWN = (
    "own"  # the task of a user's own files; its row is read off them, see `kdcli.data.labelled.own`
)


def tasks() -> dict[str, Task]:
    """Every named task."""
    families = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    return {task.name: task for family in families for task in family.TASKS}


def task_of(name: str) -> Task:
    """The row of a named task. Raises UsageError: no such task."""
    if name in (known := tasks()):
        return known[name]
    near = did_you_mean(name, [*known, OWN])
    hint = f"known: {', '.join(known)}; or '{OWN}' for your own files, given by --data"
    raise UsageError(f"unknown task '{name}'{near}", hint)
