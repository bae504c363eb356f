"""The request for the rows of a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RowsRequest:
    """The source of a task's rows, and the choice among them.

    Attributes:
        task: The name of a task, or `own`.
        source: The value of `--data`; None for the hub, or the demo.
        train_source: The source of the training split if it is another one, as for cross-lingual
            tasks.
        columns: role -> column, for `own` only.
        split: The split to evaluate on, `validation`, `test` or `verification`.
        split_seed: The seed that chooses the rows to hold out if there is no validation split.
        partition: A file that names the selection and verification rows, whatever their split.
        train_rows, judged_rows: The maximum number of rows to train and to evaluate on. Rows are
            chosen by their hashes, so that all runs choose the same.
        skip_bad: Whether to skip rows that do not fit the task.
        judge_trained_rows: Whether to evaluate on rows that a model was trained on too.
    """

    task: str
    source: str | None
    train_source: str | None = None
    columns: Mapping[str, str | list[str]] = field(default_factory=dict)
    split: str = "validation"
    split_seed: int = 0
    partition: str | None = None
    train_rows: int | None = None
    judged_rows: int | None = None
    skip_bad: bool = False
    judge_trained_rows: bool = False
