"""Workloads, one file per kind of data; see `kdcli.workloads.workload`.

A file that defines `TASKS` and `open_workload` serves the tasks of these names. All other tasks are
labelled.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdcli.engine.launch import Session
    from kdcli.models.model import Model
    from kdcli.workloads.workload import EvaluationRequest, Workload, WorkloadRequest


@cache
def modules_by_task() -> dict[str, str]:
    """Name of a task -> the module that serves it. Only modules that define `TASKS` are
    imported."""
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_text("utf-8")
        if re.search(r"^TASKS = ", source, re.MULTILINE):
            module = importlib.import_module(f"{__name__}.{path.stem}")
            found |= dict.fromkeys(module.TASKS, module.__name__)
    return found


def module_of(task: str) -> Any:
    """The module that serves a task."""
    name = modules_by_task().get(task, f"{__name__}.tasks")
    return importlib.import_module(name)


def open_workload(request: WorkloadRequest, session: Session) -> tuple[Workload, Model]:
    """Open the workload of a task and load the model that reads its rows.

    Raises:
        UsageError: unusable data or model.
    """
    open_it: Callable[[WorkloadRequest, Session], tuple[Workload, Model]]
    open_it = module_of(request.task).open_workload
    return open_it(request, session)


def open_evaluation(request: EvaluationRequest, session: Session) -> Workload:
    """Open the workload of a task to evaluate models on.

    Raises:
        UsageError: unusable data.
    """
    from kdcli.workloads import embedding, mteb_tasks

    module = module_of(request.task)
    if request.task.startswith(mteb_tasks.PREFIX):
        module = mteb_tasks
    elif not request.by_head and embedding.by_vectors(
        request.task, request.models[0], request.pooling
    ):
        module = embedding
    workload: Workload = module.open_evaluation(request, session)
    return workload
