"""Workloads, one module per kind of data; see `kdcli.workloads.workload`.

A module with `TASKS = ("NAME",)` and `open_workload` handles the tasks with these names. All other
tasks are labelled tasks. Modules without `TASKS` are parts of workloads.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdcli.data.labelled.partition import DividedRows
    from kdcli.engine.session import Session
    from kdcli.models.model import Model
    from kdcli.workloads.requests import EvaluationRequest, WorkloadRequest
    from kdcli.workloads.workload import Workload


class WorkloadModule(Protocol):
    """The functions of a module that handles tasks. Some modules only have some of them."""

    @property
    def Settings(self) -> type[BaseModel]:
        """The keys of `workload:`."""

    def open_workload(self, request: WorkloadRequest, session: Session) -> tuple[Workload, Model]:
        """Open a task for training, and load the model that reads its rows."""

    def open_evaluation(self, request: EvaluationRequest, session: Session) -> Workload:
        """Open a task to evaluate models."""

    def open_rows(self, request: EvaluationRequest, session: Session) -> DividedRows:
        """Read the rows of all splits, which a partition can divide."""


@cache
def modules_by_task() -> dict[str, str]:
    """Map the name of each task to the module that handles it. No module is imported.

    `TASKS` is therefore a tuple of plain strings on one line.
    """
    modules: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_text("utf-8")
        if found := re.search(r"^TASKS = (\(.*\))$", source, re.MULTILINE):
            tasks: tuple[str, ...] = ast.literal_eval(found[1])
            modules |= dict.fromkeys(tasks, f"{__name__}.{path.stem}")
    return modules


def module_of(task: str) -> WorkloadModule:
    """Import the module that handles a task."""
    name = modules_by_task().get(task, f"{__name__}.labelled_tasks")
    return cast("WorkloadModule", importlib.import_module(name))


def check_settings(task: str, given: Mapping[str, object]) -> None:
    """Check the keys of `workload:` for a task.

    Raises:
        UsageError: A key is unknown, or a value is not allowed.
    """
    # Help imports this module, and `kdcli.types` loads NumPy.
    from kdcli.recipe.methods import own_settings
    from kdcli.types import task_title

    own_settings(module_of(task).Settings, given, "workload", task_title(task))


def open_workload(request: WorkloadRequest, session: Session) -> tuple[Workload, Model]:
    """Open a task for training, and load the model that reads its rows."""
    return module_of(request.task).open_workload(request, session)


def open_evaluation(request: EvaluationRequest, session: Session) -> Workload:
    """Open a task to evaluate models."""
    return _evaluating_module(request).open_evaluation(request, session)


def open_rows(request: EvaluationRequest, session: Session) -> DividedRows:
    """Read the rows of all splits, which a partition can divide."""
    return _evaluating_module(request).open_rows(request, session)


def _evaluating_module(request: EvaluationRequest) -> WorkloadModule:
    """Return the module that evaluates models on a task: its own, or the one for vectors."""
    from kdcli.workloads import embeddings, eval_sets, mteb_tasks

    if request.task.startswith(mteb_tasks.PREFIX):
        return cast("WorkloadModule", mteb_tasks)
    task, first_model = request.task, request.models[0]
    if not request.by_head and eval_sets.by_vectors(task, first_model, request.pooling):
        return embeddings
    return module_of(request.task)
