"""Name a user's own data in the views of a report and in the name of a run's directory."""

import re
from pathlib import Path
from typing import TypeVar

from kdcli.data.objects import is_object
from kdcli.data.readers import format_of
from kdcli.data.storage import base_name
from kdcli.data.tasks import named_tasks
from kdcli.report.schema import Comparison, Compression, Evaluation, Report
from kdcli.report.schema_decisions import Decision
from kdcli.report.text import short
from kdcli.types import OWN, task_name

PartT = TypeVar("PartT", Evaluation, Comparison, Decision, Compression)


def data_name(task: str, source: str | None) -> str:
    """Return the name of a task or, for the user's own rows, of their file or directory.

    A name differs from all tasks' names, because a benchmark's scores may be in the same table.
    """
    if task != OWN:
        return task
    if source is None:
        return task_name(OWN)
    name = Path(short(source)).name
    return f"{name} ({task_name(OWN)})" if name in named_tasks() else name


def directory_word(task: str, source: str | None) -> str:
    """Return the part of a run directory's name that identifies the task or the user's data.

    It is `tickets` for the rows of `data/tickets.csv`, and `reviews` for the data set
    `org/reviews@main`. Wildcards and blanks are left out: `2026` stands for `data/2026-*.csv`. Data
    that Python gave as an object is in a file that is named by a hash, so the result is the task,
    `own`.
    """
    if task != OWN or source is None or is_object(source):
        return task
    name = base_name(short(source))
    form = format_of(name)
    if form is None:
        name = name.partition("@")[0]
    else:
        name = name.removesuffix(f".{form.packed}").removesuffix(f".{form.name}")
    return "-".join(re.findall(r"[\w.+-]+", name)).strip("-") or task


def with_data_names(report: Report) -> Report:
    """Return a report in which the user's own data has its name instead of the task's, `own`.

    Only the views show it. report.json keeps the name that `--task` takes.
    """
    # In a distillation on text, the recipe's data is the text.
    is_own = report.recipe.get("task") == OWN
    name, compression = data_name(OWN, report.source if is_own else None), report.compression

    def named(part: PartT) -> PartT:
        return part.model_copy(update={"task": name}) if part.task == OWN else part

    update = {
        "evaluations": list(map(named, report.evaluations)),
        "comparisons": list(map(named, report.comparisons)),
        "decisions": list(map(named, report.decisions)),
        "quality": {_renamed(task, name): models for task, models in report.quality.items()},
        "compression": compression and named(compression),
    }
    return report.model_copy(update=update)


def _renamed(task_and_set: str, name: str) -> str:
    task, space, part = task_and_set.partition(" ")
    return f"{name}{space}{part}" if task == OWN else task_and_set
