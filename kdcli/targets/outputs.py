"""Keep the outputs of scored models on disk, so that each model reads the same rows only once.

A file holds the outputs of one model for one set of rows. Its name is a hash of everything that the
outputs depend on: the model's weights and configuration, the tokens of the rows, the dtypes and the
kind of device. Another model, other rows or another maximum length therefore have another file.

Outputs are stored exactly as they were computed, so scores do not depend on where they come from.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedModel

from kdcli.data.labelled.features import TokenizedRows
from kdcli.disk import cache_key, disk_errors, write_atomic
from kdcli.engine.launch import Session
from kdcli.engine.progress import Progress
from kdcli.targets.cache import hashes_of_tokens
from kdcli.types import Array

OUTPUTS_FORMAT = 1  # incremented when the format of the files changes
VALUES, SHAPES, DIGEST = "values", "shapes", "sha256"

_folder: ContextVar[Path | None] = ContextVar("kept_outputs", default=None)


@contextmanager
def keep_outputs(folder: Path) -> Iterator[None]:
    """Keep the outputs of models that are scored within this context in a directory."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def kept_outputs(
    model: PreTrainedModel,
    fingerprint: Callable[[], str],
    rows: TokenizedRows,
    session: Session,
    compute: Callable[[], list[Array]],
) -> list[Array]:
    """Return a model's outputs for rows, from the directory of `keep_outputs` if it has them.

    Args:
        model: the model in PyTorch.
        fingerprint: returns a hash of everything in the model that the outputs depend on.
        rows: the tokenised rows.
        session: the device and the compute dtype.
        compute: computes the outputs, one float32 array per row.
    """
    folder = _folder.get()
    if folder is None or not len(rows):
        return compute()
    dtypes = str(model.dtype), str(session.compute_dtype), session.judging
    place = session.device.type, torch.__version__
    key = cache_key(OUTPUTS_FORMAT, fingerprint(), hashes_of_tokens(rows), dtypes, place)
    file = folder / f"{key}.safetensors"
    stored = _read(file) if file.is_file() else None
    if stored is not None:
        return stored
    outputs = compute()
    _write(file, outputs)
    return outputs


def _write(file: Path, outputs: Sequence[Array]) -> None:
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    values = np.concatenate([output.ravel() for output in outputs]).astype(np.float32, copy=False)
    shapes = np.array([output.shape for output in outputs], np.int64)
    metadata = {DIGEST: _digest(values, shapes)}
    write_atomic(file, save({VALUES: values, SHAPES: shapes}, metadata=metadata))


def _read(file: Path) -> list[Array] | None:
    """Return the outputs in a file, or None after a log line if the file is damaged."""
    try:
        with safe_open(file, framework="numpy") as stored:
            values, shapes = stored.get_tensor(VALUES), stored.get_tensor(SHAPES)
            digest = (stored.metadata() or {}).get(DIGEST)
    except SafetensorError as error:
        Progress.log(f"{file} is damaged ({error}), so these outputs are computed again")
        return None
    if digest != _digest(values, shapes):
        Progress.log(f"{file} is damaged (its hash differs), so these outputs are computed again")
        return None
    ends = np.cumsum(shapes.prod(axis=1))
    parts = np.split(values, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _digest(values: Array, shapes: Array) -> str:
    return hashlib.sha256(values.tobytes() + shapes.tobytes()).hexdigest()
