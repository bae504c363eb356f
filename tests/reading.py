"""Read the rows of a task."""

from dataclasses import fields

from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.task_data import Labelled, open_labelled

REQUESTED = {field.name for field in fields(RowsRequest)}


def read_task(task, source, log=None, **how) -> Labelled:
    """Read the rows of a task, and append messages to `log`.

    `how` holds fields of the request and arguments of `open_labelled`.
    """
    source = None if source is None else str(source)
    request = RowsRequest(task, source, **{k: v for k, v in how.items() if k in REQUESTED})
    rest = {k: v for k, v in how.items() if k not in REQUESTED}
    messages = [] if log is None else log

    def add(message: str) -> None:
        """Append a message, except for the classes of a benchmark."""
        if not message.startswith("classes of task "):
            messages.append(message)

    return open_labelled(request, log=add, **rest)
