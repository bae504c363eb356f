"""Derive a task from a user's own rows.

The columns are named by the user or found by convention. The labels decide the kind of the task and
its classes.
"""

import itertools
from collections.abc import Iterable, Mapping

from kdcli.data.documents import columns_in
from kdcli.data.labelled.columns import Columns, parse_columns
from kdcli.data.labelled.examples import number_of
from kdcli.data.labelled.labels import TrainingLabels
from kdcli.data.rows import BadRow, OnBadRow, Row, raise_bad_row
from kdcli.data.sources import Log
from kdcli.data.tasks.squad import IMPOSSIBLE_METRICS
from kdcli.errors import UsageError
from kdcli.types import OWN, Head, Kind, Task

HEAD = 100  # Number of rows kept in memory to tell the columns apart.
MAX_LISTED_CLASSES = 10
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
    log: Log,
    on_bad: OnBadRow = raise_bad_row,
    *,
    head: Head | None = None,
    ignores_labels: bool = False,
) -> Task:
    """Derive the task from the training rows, in one pass.

    The class names in the task's `labels` are the labels as strings. Tasks of the kinds `score`,
    `span` and `text` have no class names. If the rows have no labels, or labels are ignored, the
    task is what the model's head predicts, and its `label` is empty.

    Args:
        rows: all training rows. Their texts are not kept.
        columns: role -> column, with the roles of
            `kdcli.data.labelled.columns`. `text` may have a list of two columns.
            The key `kind` holds the kind of the task rather than a column.
        log: called with one sentence that describes the task.
        on_bad: called with each row whose label cannot be read. Such rows are ignored.
        head: what the head of the model predicts; None if there is no head.
        ignores_labels: whether the rows count as unlabelled, whatever columns they have.

    Raises:
        UsageError: a role or column does not exist or is ambiguous, there are no rows, or the
            labels do not fit any task.
    """
    kind, by_role = parse_columns(columns)
    rest = iter(rows)
    first_rows = list(itertools.islice(rest, HEAD))
    if not first_rows:
        raise UsageError("the training data holds no examples")
    by_name = Columns(first_rows, by_role)
    if head is not None and (ignores_labels or not by_name.has_label(head)):
        return _unlabelled_task(by_name, head, log)
    kind, texts, label = by_name.choose(kind)
    labels = TrainingLabels(label, kind)
    for where, row in itertools.chain(first_rows, rest):
        try:
            if label not in row:
                raise BadRow(where, f"there is no column '{label}'; {columns_in(row)}")
            labels.add(where, row[label])
            labels.rows += 1
        except BadRow as error:
            on_bad(error)
    kind, names = labels.decide()
    labels_of_task = _names_of_head(names, head)
    rows_of_labels = tuple(map(labels.first_row, names)) if labels_of_task == names else ()
    impossible = kind == "span" and labels.empty > 0
    log(_description(labels, kind, names, texts, label) + by_name.unused(*texts, label))
    if (warning := by_name.longer_text(kind, texts, label)) is not None:
        log(warning)
    return Task(
        OWN,
        kind,
        texts,
        _metrics_of(kind, names, impossible=impossible),
        labels_of_task,
        label,
        impossible=impossible,
        max_length=MAX_LENGTHS.get(kind, Task.max_length),
        rows_of_labels=rows_of_labels,
    )


def _metrics_of(kind: Kind, names: tuple[str, ...], *, impossible: bool) -> tuple[str, ...]:
    """Return the default metrics of a task with the classes `names`."""
    if impossible:
        return IMPOSSIBLE_METRICS
    return _METRICS_OF_TWO if kind == "class" and len(names) == 2 else _METRICS[kind]


def _description(
    labels: TrainingLabels, kind: Kind, names: tuple[str, ...], texts: tuple[str, ...], label: str
) -> str:
    """Describe a task for the log: its examples, its kind, its columns and its classes."""
    message = f"your data: {labels.rows} examples of kind {kind}, {' and '.join(texts)} -> {label}"
    if names:
        message += f", {len(names)} classes"
        message += f" ({', '.join(names)})" if len(names) <= MAX_LISTED_CLASSES else ""
    if kind == "span" and labels.empty:
        message += f", {labels.empty} without an answer"
    return message


def _unlabelled_task(columns: Columns, head: Head, log: Log) -> Task:
    """Return the task of rows without labels."""
    texts = columns.texts(head.kind)
    log(
        f"your data: no labels are read; models predict from {' and '.join(texts)} (kind "
        f"{head.kind}){columns.unused(*texts)}"
    )
    if (warning := columns.longer_text(head.kind, texts)) is not None:
        log(warning)
    length = MAX_LENGTHS.get(head.kind, Task.max_length)
    impossible = head.kind == "span"
    metrics = _METRICS[head.kind]
    return Task(
        OWN, head.kind, texts, metrics, head.labels, "", impossible=impossible, max_length=length
    )


def _names_of_head(names: tuple[str, ...], head: Head | None) -> tuple[str, ...]:
    """Return the class names of a head if the labels are among them, by name or by number."""
    if head is None or not head.named or not names:
        return names
    numbers = {number_of(name) for name in names}
    # Numbers that begin with 1 may count the labels from 1, for example ratings from 1 to 5.
    by_number = 0 in numbers and numbers <= set(range(len(head.labels)))
    return head.labels if set(names) <= set(head.labels) or by_number else names
