"""Workloads and targets that tests make of rows and functions."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kdcli.data.labelled.task_data import Labelled
from kdcli.types import Batch, Kind, Signals, Task
from kdcli.workloads.blocks import TextWorkload
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.settings import LabelledSettings


@dataclass(frozen=True)
class Taught:
    """Targets that a function gives: batch -> the teacher's signals."""

    of_batch: Callable[[Batch], Signals]

    def attach(self, examples, held_out):
        return examples, held_out

    def signals(self, batch):
        return self.of_batch(batch)


def rows_of(examples, held_out=None) -> Any:
    """What `distill_job` reads of a workload."""
    return SimpleNamespace(examples=examples, held_out=held_out)


def labelled(kind: Kind) -> LabelledWorkload:
    """A labelled workload without rows: its losses."""
    task = Task("stand-in", kind, ("text",), ("accuracy",))
    data = Labelled(task, [], {}, "validation")
    return LabelledWorkload(None, data, LabelledSettings(), None, None, None)


class Text(TextWorkload):
    """A text workload over given rows, which are masked already."""

    def __init__(self, session, rows, plan=None) -> None:
        self.session, self.given, self.given_plan = session, rows, plan
        self.masked = True

    @property
    def examples(self):
        return self.given

    @property
    def held_out(self):
        return self.given

    def plan(self, settings):
        return self.given_plan
