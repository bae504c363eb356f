"""Named tasks, with one file per benchmark family.

The name of a task is the value of `--task`.
"""

import importlib
import pkgutil

from kdcli.errors import UsageError, did_you_mean
from kdcli.types import OWN, Task


def named_tasks() -> dict[str, Task]:
    """Return every named task by its name."""
    families = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    return {task.name: task for family in families for task in family.TASKS}


def task_of(name: str) -> Task:
    """Return a named task. Raises UsageError if there is no such task."""
    if name in (known := named_tasks()):
        return known[name]
    near = did_you_mean(name, [*known, OWN])
    hint = f"your own files: --task {OWN} --data FILE; known tasks: {', '.join(known)}"
    raise UsageError(f"unknown task '{name}'{near}", hint)
