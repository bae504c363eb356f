"""Read the rows of a task, and what is logged."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.task_data import Labelled, open_labelled
from kdcli.messages import LOG

REQUESTED = {field.name for field in fields(RowsRequest)}


def read_task(task, source, log=None, **how) -> Labelled:
    """Read the rows of a task, and append messages to `log`.

    `how` holds fields of the request and arguments of `open_labelled`.
    """
    source = None if source is None else str(source)
    request = RowsRequest(task, source, **{k: v for k, v in how.items() if k in REQUESTED})
    rest = {k: v for k, v in how.items() if k not in REQUESTED}
    with logged_to([] if log is None else log):
        return open_labelled(request, **rest)


@contextmanager
def logged_to(lines: Any) -> Iterator[None]:
    """Append the messages of kdcli to `lines`, except for the classes of a benchmark."""

    def append(record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("classes of task "):
            lines.append(record.getMessage())

    handler = logging.Handler()
    handler.emit = append
    LOG.addHandler(handler)
    level = LOG.level
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
