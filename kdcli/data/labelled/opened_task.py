"""Find out what a task is: one with a name, or the one that a user's own rows hold."""

from collections.abc import Sequence
from dataclasses import replace

from kdcli.data.accounts import RowAccount
from kdcli.data.labelled.own import MAX_LISTED_CLASSES, own_task
from kdcli.data.labelled.request import RowsRequest
from kdcli.data.labelled.row_checks import BadRows
from kdcli.data.labelled.splits import TaskSource, read_numbered_rows
from kdcli.data.sources import Log, open_source
from kdcli.data.tasks import task_of
from kdcli.errors import UsageError
from kdcli.types import NAMED_BY, OWN, Head, LabelAccount, Task


def open_task(
    request: RowsRequest,
    bad_rows: BadRows,
    *,
    preferred: tuple[str, ...],
    head: Head | None,
    trains: bool,
    withheld: bool,
    log: Log,
) -> TaskSource:
    """Return the places of a task's rows, and log its classes.

    Args:
        request: Which rows to read.
        bad_rows: Collects the rows that cannot be used.
        preferred, head, trains, log: See `_own_task`.
        withheld: Whether the rows count as unlabelled.

    Raises:
        UsageError: The task is unknown, or its rows fit no task.
    """
    if request.task == OWN:
        task = _own_task(
            request,
            bad_rows,
            preferred=preferred,
            head=head,
            trains=trains,
            ignores_labels=withheld,
            log=log,
        )
    else:
        task = task_of(request.task)
        if request.columns:
            raise UsageError(
                f"data.columns is for --task own; task {request.task} reads the columns "
                f"{', '.join(task.texts)}, {task.label}"
            )
    has_labels = bool(task.label) and not withheld
    task = replace(task, account=task.account or _account_of(task, has_labels=has_labels))
    for line in describe_account(task):
        log(line)
    return TaskSource(
        task,
        request.source,
        request.train_source,
        bad_rows,
        withheld=not has_labels,
        log=log,
        account=RowAccount(request.source or request.task),
    )


def _own_task(
    request: RowsRequest,
    bad_rows: BadRows,
    *,
    preferred: tuple[str, ...],
    head: Head | None,
    trains: bool,
    ignores_labels: bool,
    log: Log,
) -> Task:
    """Derive the task of the user's own rows.

    Args:
        request: Which rows to read.
        bad_rows: Collects the rows whose labels cannot be read.
        preferred: The splits that the task is derived from, the first choice first.
        head: What a model's head predicts.
        trains: Whether a model learns from the rows.
        ignores_labels: Whether the rows count as unlabelled.
        log: Called with each message.

    Raises:
        UsageError: No source is given, or the rows fit no task.
    """
    source = request.source if request.train_source is None else request.train_source
    if request.source is None or source is None:
        raise UsageError(
            "no data given", "add --data: a file, or a directory with train.* and validation.*"
        )
    opened = open_source(source)
    # There may be no training split, but only one to evaluate on.
    present = [split for split in (*preferred, *opened.splits()) if opened.has(split)]
    split = present[0] if present else preferred[-1]
    try:
        rows = (row for _, row in read_numbered_rows(opened, split, bad_rows))
        return own_task(
            rows,
            request.columns,
            log,
            bad_rows,
            head=head,
            trains=trains,
            ignores_labels=ignores_labels,
        )
    except UsageError:
        if not request.skip_bad:
            # Bad rows are the likely cause, so report them first.
            bad_rows.settle(0, skip=False)
        raise


def _account_of(task: Task, *, has_labels: bool) -> LabelAccount | None:
    """Return the label account of a task with a name."""
    if not task.labels:
        return None
    return LabelAccount(task.labels, "task", "name" if has_labels else "none")


def describe_account(task: Task) -> list[str]:
    """Return a line that says what the classes are, where their names come from, and how labels
    were read as classes. A task without classes has none."""
    account = task.account
    if account is None:
        return []
    listed = _first([f"{n} {name}" for n, name in enumerate(account.names)])
    source = NAMED_BY[account.names_from]
    line = f"classes of {task.title}: {listed}; their names are from {source}"
    if account.numbers:
        read = _first([f"{number} is {name}" for number, name in account.numbers.items()])
        line += (
            "; the data and the model have no names of classes in common, so their numbers decide: "
            f"{read}; if this is wrong, write names into the data, or set head.label_map"
        )
    elif account.mapping in ("number", "order"):
        line += "; the model's classes have no names, so its outputs are taken in this order"
    return [line]


def _first(items: Sequence[str]) -> str:
    """List the first items."""
    more = " ..." if len(items) > MAX_LISTED_CLASSES else ""
    return ", ".join(items[:MAX_LISTED_CLASSES]) + more
