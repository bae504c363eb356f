"""Convert a row of a labelled data set to an `Example`, or tell what is wrong with it."""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kdcli.data.annotations import WORD, check_accepted
from kdcli.data.labelled.label_values import (
    IGNORED_WORD,
    NO_LABEL_NUMBERS,
    class_number,
    labels_in,
    may_be_no_label,
    number_of,
)
from kdcli.data.rows import BadRow, ClassName, Row, RowValues, check_encodable, columns_in
from kdcli.types import IGNORED, Answer, Example, Kind, Task

IDS = ("id", "idx", "guid")  # Columns that may hold the id of an example.
CLASSES_LISTED = 12
_short = reprlib.repr
_COLUMN_HINT = "if the column has another name, give --task own and --set data.columns.ROLE=NAME"
_LABEL_HINT = (
    f"{_COLUMN_HINT}; if the rows have no labels, give a fine-tuned model without --task: its own "
    "predictions are then the reference"
)


def example_of(task: Task, row: Row, number: int, *, withheld: bool = False) -> Example:
    """Check a row, and convert it to an example of the task.

    Args:
        task: The task.
        row: The row.
        number: The number of the row in its file. It is the example's id if the row has none.
        withheld: Whether the split may have no labels, as test sets do. A missing label, or GLUE's
            -1, is then not an error.

    Raises:
        BadRow: A column is missing or has the wrong type, or the label does not belong to the task.
    """
    where, values = row
    check_accepted(where, values, task.label)
    example_id = next((values[c] for c in IDS if values.get(c) is not None), number)
    read = _words if task.kind == "tokens" else _texts
    texts = read(task, where, values)
    name = check_encodable(where, "id", str(example_id))
    label = values.get(task.label)
    if withheld and (label is None or str(label) in ("-1", "-1.0")):
        return Example(where, name, texts, None)
    if label is None:
        problem = "is empty" if task.label in values else f"is missing; {columns_in(values)}"
        raise BadRow(
            where,
            f"column '{task.label}', the label of {task.title}, {problem}",
            hint=_LABEL_HINT,
        )
    return Example(where, name, texts, _LABELS[task.kind](task, where, label, texts))


def _texts(task: Task, where: str, values: RowValues) -> tuple[str, ...]:
    for column in task.texts:
        if column not in values:
            problem = f"{task.title} needs the column '{column}'; {columns_in(values)}"
            has_label = task.label in values
            raise BadRow(where, problem, hint=_COLUMN_HINT if has_label else _LABEL_HINT)
        if task.kind == "text" and isinstance(values[column], dict):
            # The answers of SQuAD. The question belongs to the first one.
            answers = _answers(replace(task, label=column), where, values[column], ())
            values = {**values, column: answers[0].text}
        if not isinstance(values[column], str):
            got = type(values[column]).__name__
            raise BadRow(where, f"column '{column}' must hold text, got {got}", hint=_COLUMN_HINT)
    return tuple(check_encodable(where, column, values[column]) for column in task.texts)


def _words(task: Task, where: str, values: RowValues) -> tuple[str, ...]:
    (column,) = task.texts
    words = values.get(column)
    if isinstance(words, str) and not task.label:
        # Rows without labels may be plain text. Taggers are trained on words and punctuation marks.
        words = WORD.findall(words)
    if (
        not isinstance(words, list | tuple)
        or not words
        or not all(isinstance(w, str) for w in words)
    ):
        got = f"got {_short(words)}" if column in values else columns_in(values)
        raise BadRow(
            where, f"column '{column}' must hold a list of words", f"; {got}", _COLUMN_HINT
        )
    return tuple(check_encodable(where, column, word) for word in words)


def _class(task: Task, where: str, label: object, texts: tuple[str, ...]) -> int:
    """Return the number of a class from its name or number.

    In a CSV file, numbers are strings. In a user's own files, numbers are names.
    """
    if (by_name := class_number(task.labels, str(label))) is not None:
        return by_name
    if isinstance(label, ClassName) and str(label.number) in task.labels:
        return task.labels.index(str(label.number))
    number = number_of(str(label)) if isinstance(label, str | int | float) else None
    # If any name is a number, numbers are names.
    takes_numbers = all(number_of(name) is None for name in task.labels)
    if takes_numbers and number is not None and number in range(len(task.labels)):
        return int(number)
    allowed = ", ".join(
        f"{i} ({name})" if takes_numbers else name
        for i, name in enumerate(task.labels[:CLASSES_LISTED])
    )
    more = "" if len(task.labels) <= CLASSES_LISTED else f" ... {len(task.labels)} in all"
    problem = f"'{task.label}' of {task.title} must be one of {allowed}{more}"
    hint = None
    if may_be_no_label(str(label)) or number in NO_LABEL_NUMBERS:
        hint = f"{_short(label)} looks like a missing label: remove the rows without a label"
    raise BadRow(where, problem, f", got {_short(label)}", hint)


def _classes(task: Task, where: str, label: object, texts: tuple[str, ...]) -> tuple[int, ...]:
    if isinstance(label, str):
        label = labels_in(label, task.labels)
    if not isinstance(label, list | tuple):
        raise BadRow(where, f"'{task.label}' must hold a list of labels", f", got {_short(label)}")
    return tuple(sorted({_class(task, where, name, texts) for name in label}))


def _score(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> float:
    if isinstance(label, ClassName):
        label = label.number
    try:
        score = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise BadRow(
            where,
            f"'{task.label}' of {task.title} must be a finite number",
            f", got {_short(label)}",
        )
    return score


def _word_labels(task: Task, where: str, label: object, texts: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(label, list | tuple) or len(label) != len(texts):
        got = f"{len(label)} labels" if isinstance(label, list | tuple) else _short(label)
        raise BadRow(
            where,
            f"'{task.label}' must hold a label for each",
            f" of the {len(texts)} words, got {got}",
        )
    return tuple(
        IGNORED if _is_ignored(task, name) else _class(task, where, name, texts) for name in label
    )


def _is_ignored(task: Task, label: object) -> bool:
    """Whether a word's label says that losses and metrics ignore the word."""
    return str(label) == IGNORED_WORD and IGNORED_WORD not in task.labels


def _answers(task: Task, where: str, label: object, texts: tuple[str, ...]) -> tuple[Answer, ...]:
    answers, starts = (
        (label.get("text"), label.get("answer_start")) if isinstance(label, dict) else (None, None)
    )
    if (
        not isinstance(answers, list | tuple)
        or not isinstance(starts, list | tuple)
        or [type(v) for v in (*answers, *starts)] != [str] * len(answers) + [int] * len(answers)
    ):
        form = '{"text": [...], "answer_start": [...]} as in SQuAD'
        raise BadRow(where, f"'{task.label}' must be {form}", f", got {_short(label)}")
    if not answers and not task.impossible:
        raise BadRow(
            where,
            f"the question has no answer, but {task.title} needs one",
            hint="questions without an answer must also occur in the training data; for SQuAD, "
            "give --task squad_v2",
        )
    return tuple(
        Answer(check_encodable(where, task.label, a), s)
        for a, s in zip(answers, starts, strict=True)
    )


def _target(task: Task, where: str, label: object, texts: tuple[str, ...]) -> str:
    if not isinstance(label, str) or not label.strip():
        got = f", got {_short(label)}" if label != "" else ", which is empty"
        raise BadRow(where, f"'{task.label}', the target of {task.title}, must be a text", got)
    return check_encodable(where, task.label, label)


_Label = int | float | str | tuple[int, ...] | tuple[Answer, ...]
_LABELS: Mapping[Kind, Callable[[Task, str, Any, tuple[str, ...]], _Label]] = {
    "class": _class,
    "multi": _classes,
    "score": _score,
    "tokens": _word_labels,
    "span": _answers,
    "text": _target,
}
