"""Teacher outputs from a file: vectors of texts, or probabilities and scores of a task's rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdcli.data.sources import open_source
from kdcli.data.text.sentences import Texts
from kdcli.errors import UsageError, one_line
from kdcli.types import Example, Task

Array = np.ndarray[Any, Any]
PROBABILITIES, LOGITS, SCORE = "probabilities", "logits", "score"  # columns of soft labels
LEAST = 1e-6  # of a probability, whose logarithm is the logit
SUM_OFF = 1e-2  # of the probabilities of a row


def read_vectors(file: Path, texts: Texts) -> Array:
    """The vector of each text, [N, E]. A `.npy` array [rows, E] has one for each text of the
    source, in its order; a `.parquet` file has the columns `text` and `vector`. Raises UsageError:
    another format, number or kind of values; a text without a vector; a vector that is zero or not
    finite."""
    if not file.is_file():
        raise UsageError(f"no vectors at {file}", "give a .npy or .parquet file")
    if file.suffix not in (".npy", ".parquet"):
        raise UsageError(f"{file} is neither .npy nor .parquet")
    found = _of_npy(file, texts) if file.suffix == ".npy" else _of_parquet(file, texts)
    norms_N = np.linalg.norm(np.asarray(found, dtype=np.float32), axis=1)
    if len(wrong := np.flatnonzero(~np.isfinite(norms_N) | (norms_N == 0))):
        shown = f"{texts.texts[int(wrong[0])]!r:.60}"
        raise UsageError(
            f"{file}: {len(wrong):,} vectors are zero or not finite, the first of the text {shown}"
        )
    return found


def _mapped(file: Path) -> Array:
    try:
        # Maps the file; refuses arrays of objects, which are pickled.
        return np.lib.format.open_memmap(file, mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(
            f"{file} is not a .npy array that can be read: {one_line(error)}"
        ) from None


def _of_npy(file: Path, texts: Texts) -> Array:
    rows_RE = _mapped(file)
    if rows_RE.ndim != 2 or rows_RE.dtype.kind != "f":
        raise UsageError(
            f"{file} holds {rows_RE.dtype} {list(rows_RE.shape)}; it must hold floats, a row for "
            "each text"
        )
    if len(rows_RE) != texts.read or (texts.rows < 0).any():
        pairs = (
            "; pairs need a .parquet file with the columns text and vector" if texts.paired else ""
        )
        raise UsageError(f"{file} has {len(rows_RE):,} vectors for {texts.read:,} texts{pairs}")
    return np.asarray(rows_RE[texts.rows])


def _of_parquet(file: Path, texts: Texts) -> Array:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        if missing := {"text", "vector"}.difference(table.schema_arrow.names):
            there = ", ".join(table.schema_arrow.names)
            raise UsageError(
                f"{file} has no column {' and '.join(sorted(missing))}; there are {there}"
            )
        number = {text: n for n, text in enumerate(texts.texts)}
        found: Array | None = None
        seen = np.zeros(len(texts), dtype=bool)
        for batch in table.iter_batches(columns=["text", "vector"], batch_size=4096):
            at = [number.get(text, -1) for text in batch.column("text").to_pylist()]
            vectors = np.array(batch.column("vector").to_pylist(), dtype=np.float32)
            if vectors.ndim != 2 or (found is not None and vectors.shape[1] != found.shape[1]):
                raise UsageError(f"{file}: the vectors differ in length")
            found = np.zeros((len(texts), vectors.shape[1]), np.float32) if found is None else found
            known = np.array(at) >= 0
            found[np.array(at)[known]], seen[np.array(at)[known]] = vectors[known], True
    except (pa.ArrowException, ValueError, TypeError, OSError) as error:
        raise UsageError(
            f"{file} is not a parquet file of texts and vectors: {one_line(error)}"
        ) from None
    if found is None or not seen.all():
        first = texts.texts[int(np.flatnonzero(~seen)[0])]
        raise UsageError(
            f"{file} has no vector for {int((~seen).sum()):,} of {len(texts):,} texts, the first "
            f"{first!r:.60}"
        )
    return found


def read_soft_labels(file: Path, task: Task, examples: Sequence[Example]) -> tuple[Array, str]:
    """Logits of each training row, [N, C] float32, and how they were matched. A `.npy` array [N, C]
    holds probabilities, or scores [N] of a `score` task, in the order of the rows. A row of
    `.jsonl` or `.parquet` has `probabilities` or `logits`, a list in the order of the labels or a
    mapping of their names, or `score`; with the task's columns of texts too, rows are matched by
    these, otherwise by their order. Raises UsageError: another format, number or kind of values; a
    training row without soft labels."""
    if task.kind not in ("class", "multi", "score"):
        raise UsageError(
            f"--soft-labels are for whole rows; task {task.name} is of kind {task.kind}"
        )
    if not file.is_file() or file.suffix not in (".npy", ".jsonl", ".parquet"):
        there = "is neither .npy, .jsonl nor .parquet" if file.is_file() else "is not there"
        raise UsageError(f"soft labels {file}: the file {there}")
    if file.suffix == ".npy":
        array = _mapped(file)
        if array.dtype.kind not in "fiu" or array.ndim != (1 if task.kind == "score" else 2):
            shape = "[rows]" if task.kind == "score" else "[rows, classes]"
            raise UsageError(
                f"{file} holds {array.dtype} {list(array.shape)}; task {task.name} needs numbers "
                f"{shape}"
            )
        _check_count(file, len(array), examples)
        values_NC = np.array(array, dtype=np.float64).reshape(len(array), -1)
        names = [f"{file} row {n}" for n in range(len(array))]
        return _as_logits(
            task, names, values_NC, task.kind != "score"
        ), "matched by the order of the rows"
    return _of_rows(file, task, examples)


def _of_rows(file: Path, task: Task, examples: Sequence[Example]) -> tuple[Array, str]:
    names, values, texts = [], [], []
    column = None
    ((_, rows),) = open_source(str(file)).tables("train")
    for where, row in rows:
        if column is None:
            known = (SCORE,) if task.kind == "score" else (PROBABILITIES, LOGITS)
            column = next((name for name in known if name in row), None)
            if column is None:
                raise UsageError(
                    f"{where}: no column {' or '.join(known)}; there are {', '.join(row)}"
                )
        names.append(where)
        values.append(_numbers(where, column, row.get(column), task))
        texts.append(tuple(row.get(name) for name in task.texts))
    if column is None:
        raise UsageError(f"{file} holds no rows")
    logits_NC = _as_logits(task, names, np.array(values), column == PROBABILITIES)
    if not all(isinstance(text, str) for text in texts[0]):
        _check_count(file, len(values), examples)
        return logits_NC, "matched by the order of the rows"
    place = {text: n for n, text in enumerate(texts)}
    at = [place.get(example.texts, -1) for example in examples]
    if -1 in at:
        first = examples[at.index(-1)]
        raise UsageError(
            f"{file} has no soft labels for {at.count(-1):,} of {len(at):,} training rows, the "
            f"first {first.where}"
        )
    return logits_NC[at], f"matched by {' and '.join(task.texts)}"


def _check_count(file: Path, found: int, examples: Sequence[Example]) -> None:
    if found != len(examples):
        raise UsageError(
            f"{file} has {found:,} rows for {len(examples):,} training rows",
            "rows may be held back from training: a .jsonl or .parquet file with the texts is "
            "matched by them",
        )


def _numbers(where: str, column: str, given: Any, task: Task) -> list[float]:
    if isinstance(given, Mapping) and set(given) == set(task.labels):
        given = [given[label] for label in task.labels]
    found = [given] if column == SCORE else given
    wanted = len(task.labels) or 1
    fits = isinstance(found, list | tuple) and len(found) == wanted
    if not fits or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in found):
        what = "a number" if column == SCORE else f"{wanted} numbers, of {', '.join(task.labels)}"
        raise UsageError(f"{where}: '{column}' must hold {what}, got {given!r:.80}")
    return [float(x) for x in found]


def _as_logits(task: Task, names: Sequence[str], values_NC: Array, probabilities: bool) -> Array:
    """Values of each row as logits; a UsageError where they are none."""
    classes = len(task.labels) or 1
    if values_NC.shape[1] != classes:
        raise UsageError(
            f"{names[0]}: {values_NC.shape[1]} values; task {task.name} has {classes} outputs"
        )
    wrong_N = ~np.isfinite(values_NC).all(1)
    if probabilities:
        wrong_N |= (values_NC < 0).any(1) | (values_NC > 1).any(1)
        if task.kind == "class":
            wrong_N |= np.abs(values_NC.sum(1) - 1) > SUM_OFF
    if wrong_N.any():
        n = int(wrong_N.argmax())
        what = (
            "probabilities" + (" that sum to 1" if task.kind == "class" else "")
            if probabilities
            else "finite"
        )
        raise UsageError(f"{names[n]}: the values must be {what}, got {values_NC[n].tolist()}")
    if probabilities:
        p = values_NC.clip(LEAST, 1 - LEAST if task.kind == "multi" else 1)
        values_NC = np.log(p) if task.kind == "class" else np.log(p) - np.log1p(-p)
    return values_NC.astype(np.float32)
