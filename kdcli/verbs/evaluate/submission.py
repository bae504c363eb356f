"""Write files for the GLUE server: one per task, or two for MNLI.

The files are tab-separated, with a header and one row per example.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from kdcli.disk import disk_errors, write_atomic
from kdcli.errors import UsageError
from kdcli.types import Task

MIN_SCORE, MAX_SCORE = 0.0, 5.0  # Of STS-B. The server rejects other scores.


def check_submission(task: Task) -> None:
    """Raise a UsageError if the server does not have this task."""
    if not task.glue:
        hint = "--submission is for cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte and wnli"
        raise UsageError(f"{task.title} is not a GLUE task, so there is no file to submit", hint)


def write_submission(folder: Path, task: Task, name: str, values: Sequence[float]) -> Path:
    """Write the file of one set of a task, and return its path.

    Args:
        folder: The directory of the file. It is created if necessary.
        task: A task of GLUE.
        name: The name of the set, or "" if the task has only one.
        values: The class number or score of each test example, in the order of the test file.

    Raises:
        MachineError: The disk is full or not writable.
    """
    file = f"{task.glue[name] if name else next(iter(task.glue.values()))}.tsv"
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", "prediction"])
    cells: Sequence[object] = values
    if task.kind == "score":
        cells = [f"{min(max(float(value), MIN_SCORE), MAX_SCORE):.3f}" for value in values]
    elif task.glue_words:
        cells = [task.labels[int(value)] for value in values]
    writer.writerows(enumerate(cells))
    with disk_errors(folder / file):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / file, text.getvalue())
    return folder / file
