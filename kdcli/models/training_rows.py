"""The rows of labelled data that trained a model: sorted hashes in a file next to its weights.

A model made of another carries the other's rows too. Whoever judges a model leaves its rows out.
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

FILE, TENSOR = "training_rows.safetensors", "row_hashes"
NO_ROWS: RowHashes = np.empty(0, np.uint64)


def training_rows(where: str) -> RowHashes:
    """The hashes, sorted, of the rows that trained a model; none where nothing is recorded.
    `where`: a directory or a hub id, as `from_pretrained` takes it. Raises UsageError: the file is
    damaged."""
    if (file := file_beside(where, FILE)) is None:
        return NO_ROWS
    try:
        rows = load(file.read_bytes())[TENSOR]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UsageError(
            f"{file} is damaged: {error}", "copy the model again from where it was made"
        ) from None
    if rows.dtype != np.uint64 or rows.ndim != 1:
        raise UsageError(
            f"{file} must hold one row of uint64, it holds {rows.ndim} dimensions of {rows.dtype}"
        )
    return all_rows(rows)


def write_training_rows(folder: Path, rows: RowHashes) -> None:
    """Record the rows in a model's directory; no file for no rows. Raises MachineError: see
    `write_atomic`."""
    if len(rows):
        write_atomic(folder / FILE, save({TENSOR: all_rows(rows)}))


def all_rows(*parts: RowHashes) -> RowHashes:
    """The rows of several models, sorted, each once."""
    return reduce(np.union1d, parts, NO_ROWS)
