"""Teacher outputs from a file: vectors of documents, or soft labels for a task's rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data.sources import open_source
from kdcli.errors import UsageError, one_line
from kdcli.types import Array, Example, Task

ARRAY_HINT = "write floats [rows, width]: np.save('vectors.npy', np.asarray(vectors, 'float32'))"
# Columns of soft labels.
PROBABILITIES_COLUMN = "probabilities"
LOGITS_COLUMN = "logits"
SCORE_COLUMN = "score"
SAME = 0.01  # two rows of one text may differ by this much
MIN_PROBABILITY = 1e-6  # smaller probabilities are raised to this before the logarithm
SUM_TOLERANCE = 1e-2  # for the sum of a row's probabilities


def open_npy(path: Path, name: object) -> np.memmap[Any, np.dtype[Any]]:
    """Map a `.npy` array. `name` stands for the file in an error.

    Raises:
        UsageError: It is not a plain array.
    """
    try:
        # Unlike `np.load`, this never unpickles objects.
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError) as error:
        message = f"{name} cannot be read as a .npy array: {one_line(error)}"
        raise UsageError(message, ARRAY_HINT) from None


def check_floats(name: object, dtype: str, shape: Sequence[int], *, is_float: bool) -> None:
    """Raise a UsageError unless a file holds floats, [rows, width]."""
    if len(shape) != 2 or shape[1] == 0 or not is_float:
        raise UsageError(
            f"{name} holds {dtype} {list(shape)}; it must hold floats, with one row for each text",
            ARRAY_HINT,
        )


def read_npy(file: Path, count: int) -> Array:
    """Read a `.npy` array with one vector for each of `count` documents, [count, E].

    Args:
        file: The file.
        count: The number of documents.

    Raises:
        UsageError: The file has the wrong format, number of rows or kind of values, or a vector is
            not finite.
    """
    if not file.is_file():
        raise UsageError(f"no vectors at {file}", "give a .npy file with a row for each document")
    rows_NE = open_npy(file, file)
    check_floats(file, str(rows_NE.dtype), rows_NE.shape, is_float=rows_NE.dtype.kind == "f")
    if len(rows_NE) != count:
        raise UsageError(f"{file} has {len(rows_NE):,} vectors for {count:,} documents")
    vectors_NE = np.asarray(rows_NE, dtype=np.float32)
    if len(wrong := np.flatnonzero(~np.isfinite(vectors_NE).all(1))):
        raise UsageError(f"{file}: {len(wrong):,} vectors are not finite, the first: {wrong[0]}")
    return vectors_NE


def read_soft_labels(file: Path, task: Task, examples: Sequence[Example]) -> tuple[Array, str]:
    """Read soft labels for the training rows.

    A `.npy` array holds probabilities, [N, C], or for a `score` task scores, [N], in the order of
    the rows. A row of a `.jsonl` or `.parquet` file has `probabilities` or `logits`, either a list
    in label order or a mapping from label names, or for a `score` task `score`. If the rows also
    have the task's text columns, they are matched by text, otherwise by order.

    Args:
        file: The file.
        task: The task.
        examples: The training examples.

    Returns:
        The logits, [N, C] float32, and a note on how rows were matched.

    Raises:
        UsageError: The file has the wrong format, number of rows or kind of values, or a training
            row has no soft labels.
    """
    if task.kind not in ("class", "multi", "score"):
        raise UsageError(
            f"--soft-labels works for kinds class, multi and score; {task.title} is of kind "
            f"{task.kind}"
        )
    if not file.is_file() or file.suffix not in (".npy", ".jsonl", ".parquet"):
        problem = "is neither .npy, .jsonl nor .parquet" if file.is_file() else "does not exist"
        raise UsageError(f"soft labels {file}: the file {problem}")
    if file.suffix == ".npy":
        array = open_npy(file, file)
        if array.dtype.kind not in "fiu" or array.ndim != (1 if task.kind == "score" else 2):
            shape = "[rows]" if task.kind == "score" else "[rows, classes]"
            raise UsageError(
                f"{file} holds {array.dtype} {list(array.shape)}; {task.title} needs numbers "
                f"{shape}"
            )
        _check_count(file, len(array), examples)
        values_NC = np.array(array, dtype=np.float64).reshape(len(array), -1)
        names = [f"{file} row {n}" for n in range(len(array))]
        logits_NC = _as_logits(task, names, values_NC, task.kind != "score")
        return logits_NC, "matched by the order of the rows"
    return _from_rows(file, task, examples)


def _from_rows(file: Path, task: Task, examples: Sequence[Example]) -> tuple[Array, str]:
    names, values, texts = [], [], []
    column = None
    ((_, rows),) = open_source(str(file)).tables("train")
    for where, row in rows:
        if column is None:
            allowed = (
                (SCORE_COLUMN,) if task.kind == "score" else (PROBABILITIES_COLUMN, LOGITS_COLUMN)
            )
            column = next((name for name in allowed if name in row), None)
            if column is None:
                raise UsageError(
                    f"{where}: no column {' or '.join(allowed)}; there are {', '.join(row)}"
                )
        names.append(where)
        values.append(_numbers(where, column, row.get(column), task))
        texts.append(tuple(row.get(name) for name in task.texts))
    if column is None:
        raise UsageError(f"{file} holds no rows")
    logits_NC = _as_logits(task, names, np.array(values), column == PROBABILITIES_COLUMN)
    if not all(isinstance(text, str) for text in texts[0]):
        _check_count(file, len(values), examples)
        return logits_NC, "matched by the order of the rows"
    number: dict[tuple[object, ...], int] = {}
    for n, text in enumerate(texts):
        earlier = number.setdefault(text, n)
        # Rows of one text that were scored in other batches differ by rounding.
        if not np.allclose(values[n], values[earlier], atol=SAME):
            raise UsageError(
                f"{names[n]}: the text has other values in {names[earlier]}",
                "keep one row for each text",
            )
    at = [number.get(example.texts, -1) for example in examples]
    if -1 in at:
        first = examples[at.index(-1)]
        raise UsageError(
            f"{file} has no soft labels for {at.count(-1):,} of {len(at):,} training rows, the "
            f"first being {first.where}"
        )
    return logits_NC[at], f"matched by {' and '.join(task.texts)}"


def _check_count(file: Path, count: int, examples: Sequence[Example]) -> None:
    if count != len(examples):
        raise UsageError(
            f"{file} has {count:,} rows for {len(examples):,} training rows",
            "some rows may be held back from training; use a .jsonl or .parquet file that also has "
            "the texts, so that rows are matched by text",
        )


def _numbers(where: str, column: str, value: Any, task: Task) -> list[float]:
    """Return the numbers of a row, in label order."""
    if isinstance(value, Mapping) and set(value) == set(task.labels):
        value = [value[label] for label in task.labels]
    numbers = [value] if column == SCORE_COLUMN else value
    count = len(task.labels) or 1
    fits = isinstance(numbers, list | tuple) and len(numbers) == count
    if not fits or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers):
        allowed = (
            "a number" if column == SCORE_COLUMN else f"{count} numbers ({', '.join(task.labels)})"
        )
        raise UsageError(f"{where}: '{column}' must hold {allowed}, got {value!r:.80}")
    return [float(x) for x in numbers]


def _as_logits(task: Task, names: Sequence[str], values_NC: Array, probabilities: bool) -> Array:
    """Convert the values of each row to logits.

    Raises:
        UsageError: The number of values is wrong, they are not finite, or they are not
            probabilities.
    """
    classes = len(task.labels) or 1
    if values_NC.shape[1] != classes:
        raise UsageError(
            f"{names[0]}: {values_NC.shape[1]} values; {task.title} has {classes} outputs"
        )
    wrong_N = ~np.isfinite(values_NC).all(1)
    if probabilities:
        wrong_N |= (values_NC < 0).any(1) | (values_NC > 1).any(1)
        if task.kind == "class":
            wrong_N |= np.abs(values_NC.sum(1) - 1) > SUM_TOLERANCE
    if wrong_N.any():
        n = int(wrong_N.argmax())
        allowed = "finite"
        if probabilities:
            allowed = "probabilities that sum to 1" if task.kind == "class" else "probabilities"
        raise UsageError(f"{names[n]}: the values must be {allowed}, got {values_NC[n].tolist()}")
    if probabilities:
        maximum = 1 - MIN_PROBABILITY if task.kind == "multi" else 1
        p = values_NC.clip(MIN_PROBABILITY, maximum)
        values_NC = np.log(p) if task.kind == "class" else np.log(p) - np.log1p(-p)
    return values_NC.astype(np.float32)
