"""Derive a task from a user's own rows.

The columns are named by the user or found by convention. The labels decide the kind of the task and
its classes.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kdcli.data.annotations import check_accepted
from kdcli.data.labelled.columns import Columns, parse_columns
from kdcli.data.labelled.label_values import (
    IGNORED_WORD,
    as_cell,
    class_number,
    describe_unknown_scheme,
    number_of,
)
from kdcli.data.labelled.labels import TrainingLabels
from kdcli.data.rows import FIRST_ROWS, BadRow, OnBadRow, Row, columns_in, raise_bad_row
from kdcli.data.tasks.squad import IMPOSSIBLE_METRICS
from kdcli.errors import UsageError
from kdcli.listing import MAX_LISTED, class_name, class_names, listed
from kdcli.messages import log_fact, warn
from kdcli.types import OWN, Head, Kind, LabelAccount, Task

# Maximum number of tokens per row. A `span` window has the length used for SQuAD, because it must
# hold the question, the overlap and more. A `text` row has the length used for summaries.
MAX_LENGTHS: Mapping[Kind, int] = {"span": 384, "text": 512}

_METRICS: Mapping[Kind, tuple[str, ...]] = {
    "class": ("accuracy", "macro_f1"),
    "multi": ("micro_f1", "macro_f1", "exact"),
    "score": ("pearson", "spearman", "mse"),
    "tokens": ("f1", "precision", "recall", "accuracy"),
    "span": ("exact", "f1"),
    "text": ("rougeL", "rouge1", "rouge2", "bleu", "exact"),
}
_METRICS_OF_TWO = ("accuracy", "f1", "matthews")


def own_task(
    rows: Iterable[Row],
    columns: Mapping[str, str | list[str]],
    on_bad: OnBadRow = raise_bad_row,
    *,
    head: Head | None = None,
    trains: bool = True,
    ignores_labels: bool = False,
) -> Task:
    """Derive the task from the training rows, in one pass.

    The class names in the task's `labels` are the labels as strings. Tasks of the kinds `score`,
    `span` and `text` have no class names. If the rows have no labels, or labels are ignored, the
    task is what the model's head predicts, and its `label` is empty.

    Args:
        rows: All training rows. Their texts are not kept.
        columns: role -> column, with the roles of
            `kdcli.data.labelled.columns`. `text` may have a list of two columns.
            The key `kind` holds the kind of the task rather than a column.
        on_bad: Called with each row whose label cannot be read. Such rows are ignored.
        head: The labels and kind of the model's head; None if there is no head.
        trains: Whether a model learns from the rows. Rows that only evaluate a head may all have
            one label.
        ignores_labels: Whether the rows count as unlabelled, whatever columns they have.

    Raises:
        UsageError: A role or column does not exist or is ambiguous, there are no rows, or the
            labels do not fit any task.
    """
    kind, by_role = parse_columns(columns)
    rest = iter(rows)
    first_rows = list(itertools.islice(rest, FIRST_ROWS))
    if not first_rows:
        raise UsageError("the training data holds no examples")
    by_name = Columns(first_rows, by_role)
    if head is not None and (ignores_labels or not by_name.has_label(head)):
        if not ignores_labels:
            by_name.check_unlabelled(rest, head)
        return _unlabelled_task(by_name, kind, head)
    kind, texts, label = by_name.choose(kind)
    labels = TrainingLabels(label, kind)
    for where, row in itertools.chain(first_rows, rest):
        try:
            check_accepted(where, row, label)
            if label not in row:
                raise BadRow(where, f"there is no column '{label}'; {columns_in(row)}")
            labels.add(where, as_cell(row[label]))
            labels.rows += 1
        except BadRow as error:
            on_bad(error)
    # A new head learns the labels of the data, whatever the model's own head predicts.
    decides = head is not None and (head.named or not trains)
    kind, names = labels.decide(
        one_is_enough=head is not None and not trains,
        of_head=head.kind if head is not None and decides else None,
    )
    if head is not None and decides and "kind" not in columns:
        labels.check_outputs(head)
    impossible = kind == "span" and labels.empty > 0
    log_fact(_description(labels, kind, names, texts, label) + by_name.unused(*texts, label))
    for note in labels.notes:
        log_fact(note)
    account = _account(names, labels.class_numbers, head if decides else None)
    _compare_names(label, *by_name.names_of_numbers(label), account)
    rows_of_labels = labels.first_rows(names) if account.names == names else {}
    task = _task(by_name, kind, texts, label, account.names)
    metrics = IMPOSSIBLE_METRICS if impossible else task.metrics
    if kind == "class" and len(account.names) == 2:
        metrics = _METRICS_OF_TWO
    return replace(
        task,
        metrics=metrics,
        impossible=impossible,
        rows_of_labels=rows_of_labels,
        decimal_comma=bool(labels.comma_at),
        account=account if names else None,
        score_name=head.score_name if head is not None and decides else "",
    )


def _compare_names(
    label: str, column: str, names: Mapping[str, str], account: LabelAccount
) -> None:
    """Tell that another column names the numbers of the label.

    Args:
        label: The column of the label.
        column: The column of the names; empty if there is none.
        names: number -> name.
        account: The classes as which the numbers are read.

    Raises:
        UsageError: The head of the model has other names for these numbers.
    """
    way = f"--set data.columns.label={column}"
    for number, name in names.items():
        of_head = account.numbers.get(number, name)
        if class_number((of_head,), name) is None:
            raise UsageError(
                f"class {number} of '{label}' is '{name}' in column '{column}', but '{of_head}' in "
                "the head of the model",
                f"read the names instead of the numbers with {way}; if both name the same class, "
                "also give the data's number of each of the model's classes with --set "
                "head.label_map='[0, 1, ...]'",
            )
    if names and not account.numbers:
        classes = listed(f"{number} {class_name(name)}" for number, name in names.items())
        log_fact(f"column '{column}' names the classes ({classes}); use these names with {way}")


def _task(
    columns: Columns,
    kind: Kind,
    texts: tuple[str, ...],
    label: str,
    labels: tuple[str, ...],
) -> Task:
    """Return a task with the default metrics, and warn of what its columns may not mean."""
    warnings = [
        columns.longer_text(kind, texts, label),
        describe_unknown_scheme(labels) if kind == "tokens" else None,
        columns.describe_splits(*texts, label),
    ]
    warn(*filter(None, warnings))
    max_length = MAX_LENGTHS.get(kind, Task.max_length)
    return Task(OWN, kind, texts, _METRICS[kind], labels, label, max_length=max_length)


def _description(
    labels: TrainingLabels, kind: Kind, names: tuple[str, ...], texts: tuple[str, ...], label: str
) -> str:
    """Describe a task for the log: its examples, its kind, its columns and its classes."""
    message = f"your data: {labels.rows} examples of kind {kind}, {' and '.join(texts)} -> {label}"
    if names:
        message += f", {len(names)} classes"
        message += f" ({class_names(names)})" if len(names) <= MAX_LISTED else ""
    if kind == "span" and labels.empty:
        message += f", {labels.empty} without an answer"
    if labels.ignored:
        message += f", {labels.ignored:,} words with the label {IGNORED_WORD} are ignored"
    return message


def _unlabelled_task(columns: Columns, kind: Kind | None, head: Head) -> Task:
    """Return the task of rows without labels.

    Raises:
        UsageError: The model cannot predict the kind that the user gave.
    """
    # A model for several labels per text may not say so in its configuration.
    if kind not in (None, head.kind) and {kind, head.kind} != {"class", "multi"}:
        raise UsageError(
            f"data.columns.kind={kind}, but no labels are read, and the head of the model predicts "
            f"kind {head.kind}",
            "remove data.columns.kind, or name the column of the labels with --set "
            "data.columns.label=NAME",
        )
    kind = kind or head.kind
    texts = columns.texts(kind)
    log_fact(
        f"your data: no labels are read; models predict from {' and '.join(texts)} (kind "
        f"{kind}){columns.unused(*texts)}"
    )
    task = _task(columns, kind, texts, "", head.labels)
    account = LabelAccount(head.labels, "head", "none") if head.labels else None
    return replace(task, impossible=kind == "span", account=account, score_name=head.score_name)


def _account(
    names: tuple[str, ...], class_numbers: Mapping[str, int], head: Head | None
) -> LabelAccount:
    """Return the classes of the data, or of a head whose classes they are, by name or by number.

    Args:
        names: The labels of the data.
        class_numbers: The numbers of the labels whose source numbers them.
        head: The labels and kind of the model's head; None if the data decides.
    """
    own = LabelAccount(names, "schema" if class_numbers else "values", "name")
    if head is None or not head.labels or not names:
        return own
    of_head = LabelAccount(head.labels, "head" if head.named else "values", "name")
    places = [class_number(head.labels, name) for name in names]
    if None not in places and len(set(places)) == len(names):
        return of_head
    by_number = {class_numbers.get(name, number_of(name)): name for name in names}
    # Numbers that begin with 1 may count the labels from 1, for example ratings from 1 to 5.
    fit = 0 in by_number and by_number.keys() <= set(range(len(head.labels)))
    if not fit:
        return own if head.named else replace(own, mapping="order")
    if not head.named:
        # The classes of a head without names are called as in the data.
        classes = [by_number.get(n, str(n)) for n in range(len(head.labels))]
        return replace(own, names=tuple(classes), mapping="number")
    # A head has numbers for names if it was trained on numbers without names.
    if class_numbers and any(number_of(name) is None for name in head.labels):
        return own
    pairs = {name: head.labels[int(n or 0)] for n, name in sorted(by_number.items())}
    return replace(of_head, mapping="number", numbers=pairs)
