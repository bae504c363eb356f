"""A row of a labelled data set -> an `Example`, or an error that names the row and what is wrong
with it."""

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kdcli.data.documents import check_text
from kdcli.data.rows import BadRow, Row
from kdcli.types import Answer, Example, Kind, Task

IDS = ("id", "idx", "guid")  # Columns that may name an example.
CLASSES_LISTED = 12
_short = reprlib.repr
_COLUMNS = "a column of another name is given by --set data.columns.ROLE=NAME, with --task own"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(
    r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE
)
_LONGEST_NUMBER = 40


def number_of(text: str) -> int | float | None:
    """The number that a string spells, be it infinite or not a number; None if it spells none."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not _REAL.fullmatch(text):
        return None
    return int(text) if _WHOLE.fullmatch(text) else float(text)


def example_of(task: Task, row: Row, number: int, *, withheld: bool = False) -> Example:
    """Check a row and take what the task reads. `number`: of the row in its file, which names the
    example when the row does not. `withheld`: the split has no labels (test sets): a missing one,
    or the -1 of GLUE, is not an error. Raises BadRow: a column is missing or of another type, or
    the label is none of the task's."""
    where, values = row
    named = next((values[c] for c in IDS if values.get(c) is not None), number)
    read = _words if task.kind == "tokens" else _texts
    texts = read(task, where, values)
    name = check_text(where, "id", str(named))
    label = values.get(task.label)
    if withheld and (label is None or str(label) in ("-1", "-1.0")):
        return Example(where, name, texts, None)
    if label is None:
        wrong = (
            "is empty" if task.label in values else f"is not there; there are {', '.join(values)}"
        )
        raise BadRow(
            where, f"column '{task.label}', the label of task {task.name}, {wrong}", hint=_COLUMNS
        )
    return Example(where, name, texts, _LABELS[task.kind](task, where, label, texts))


def _texts(task: Task, where: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    for column in task.texts:
        if column not in values:
            missing = (
                f"reads the column '{column}', which is not there; there are {', '.join(values)}"
            )
            raise BadRow(where, f"task {task.name} {missing}", hint=_COLUMNS)
        if task.kind == "text" and isinstance(values[column], dict):
            # SQuAD's answers: a question is asked for the first.
            answers = _answers(replace(task, label=column), where, values[column], ())
            values = {**values, column: answers[0].text}
        if not isinstance(values[column], str):
            got = type(values[column]).__name__
            raise BadRow(where, f"column '{column}' must hold text, got {got}", hint=_COLUMNS)
    return tuple(check_text(where, column, values[column]) for column in task.texts)


def _words(task: Task, where: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    (column,) = task.texts
    words = values.get(column)
    if (
        not isinstance(words, list | tuple)
        or not words
        or not all(isinstance(w, str) for w in words)
    ):
        there = f"got {_short(words)}" if column in values else f"there are {', '.join(values)}"
        raise BadRow(where, f"column '{column}' must hold a list of words", f"; {there}", _COLUMNS)
    return tuple(check_text(where, column, word) for word in words)


def _class(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> int:
    """A class by its name or its number, which in a CSV file is a string; numbers of an own file
    are the names."""
    if str(label) in task.labels:
        return task.labels.index(str(label))
    number = int(label) if isinstance(label, str) and label.isdecimal() else label
    # Where the names are numbers themselves, a number is a name.
    named = all(number_of(name) is None for name in task.labels)
    if (
        named
        and not isinstance(number, bool)
        and isinstance(number, int | float)
        and number in range(len(task.labels))
    ):
        return int(number)
    allowed = ", ".join(
        f"{i} ({name})" if named else name for i, name in enumerate(task.labels[:CLASSES_LISTED])
    )
    more = "" if len(task.labels) <= CLASSES_LISTED else f" ... {len(task.labels)} in all"
    problem = f"'{task.label}' of task {task.name} must be one of {allowed}{more}"
    raise BadRow(where, problem, f", got {_short(label)}")


def _classes(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(label, list | tuple):
        raise BadRow(where, f"'{task.label}' must hold a list of labels", f", got {_short(label)}")
    return tuple(sorted({_class(task, where, one, texts) for one in label}))


def _score(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> float:
    try:
        score = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise BadRow(
            where,
            f"'{task.label}' of task {task.name} must be a finite number",
            f", got {_short(label)}",
        )
    return score


def _word_labels(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(label, list | tuple) or len(label) != len(texts):
        got = f"{len(label)} of them" if isinstance(label, list | tuple) else _short(label)
        raise BadRow(
            where,
            f"'{task.label}' must hold a label for each",
            f" of the {len(texts)} words, got {got}",
        )
    return tuple(_class(task, where, one, texts) for one in label)


def _answers(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> tuple[Answer, ...]:
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
        hint = (
            "where answers may be missing, some must be missing in training too; of SQuAD use "
            "--task squad_v2"
        )
        raise BadRow(
            where, f"a question without an answer, which task {task.name} does not know", hint=hint
        )
    return tuple(
        Answer(check_text(where, task.label, a), s) for a, s in zip(answers, starts, strict=True)
    )


def _target(task: Task, where: str, label: Any, texts: tuple[str, ...]) -> str:
    if not isinstance(label, str) or not label.strip():
        got = f", got {_short(label)}" if label != "" else ", which is empty"
        raise BadRow(where, f"'{task.label}', the target of task {task.name}, must be a text", got)
    return check_text(where, task.label, label)


_LABELS: Mapping[Kind, Callable[[Task, str, Any, tuple[str, ...]], Any]]
_LABELS = {
    "class": _class,
    "multi": _classes,
    "score": _score,
    "tokens": _word_labels,
    "span": _answers,
}
_LABELS |= {"text": _target}
