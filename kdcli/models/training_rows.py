"""Record which rows of labelled data trained a model.

The record is a file of sorted hashes next to the model's weights. A model that is made from another
one inherits its rows. Evaluation drops a model's training rows.
"""

from functools import reduce
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from kdcli.disk import write_atomic
from kdcli.errors import UsageError
from kdcli.models.files import file_beside
from kdcli.types import RowHashes

ROWS_FILE, TENSOR = "training_rows.safetensors", "row_hashes"
NO_ROWS: RowHashes = np.empty(0, np.uint64)


def training_rows(where: str) -> RowHashes:
    """Return the sorted hashes of the rows that trained a model; empty if nothing is recorded.

    `where` is a directory or a hub id, as in `from_pretrained`. Raises UsageError if the file is
    damaged.
    """
    if (file := file_beside(where, ROWS_FILE)) is None:
        return NO_ROWS
    try:
        rows = load(file.read_bytes())[TENSOR]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UsageError(
            f"{file} is damaged: {error}", "copy the model again from the original directory"
        ) from None
    if rows.dtype != np.uint64 or rows.ndim != 1:
        raise UsageError(
            f"{file} must hold one dimension of uint64, but it holds {rows.ndim} dimensions of "
            f"{rows.dtype}",
            "copy the model again from the original directory",
        )
    return all_rows(rows)


def write_training_rows(folder: Path, rows: RowHashes) -> None:
    """Record the rows in a model's directory; without rows, no file is written.

    Raises MachineError if the file cannot be written.
    """
    if len(rows):
        write_atomic(folder / ROWS_FILE, save({TENSOR: all_rows(rows)}))


def all_rows(*parts: RowHashes) -> RowHashes:
    """Return the rows of several models, sorted and without duplicates."""
    return reduce(np.union1d, parts, NO_ROWS)
