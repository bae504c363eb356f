"""Keep the outputs of scored models on disk, so that each model reads the same rows only once.

A file holds the outputs of one model for one set of rows. Its name is a hash of everything that the
outputs depend on: the model's weights, configuration and code, the tokens of the rows, the dtypes,
the kind of device, and the versions of torch and transformers. Another model, other rows or another
maximum length therefore have another file.

Outputs are stored exactly as they were computed, so scores do not depend on where they come from.
No run needs these files: if one cannot be written or read, the outputs are computed again.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedModel

from kdcli.data.labelled.features import TokenizedRows
from kdcli.disk import cache_key, disk_errors, write_atomic
from kdcli.engine.session import Session
from kdcli.errors import MachineError
from kdcli.messages import log
from kdcli.targets.cache import hashes_of_tokens
from kdcli.types import Array

OUTPUTS_FORMAT = 2  # incremented when the format of the files changes
VALUES, SHAPES, DIGEST = "values", "shapes", "sha256"
MAX_FILE_BYTES, MAX_FOLDER_BYTES = 1 << 28, 1 << 30
"""Maximum size of the outputs in one file, and of all files after `delete_oldest_outputs`."""

_folder: ContextVar[Path | None] = ContextVar("outputs_folder", default=None)


@contextmanager
def keep_outputs(folder: Path) -> Iterator[None]:
    """Keep the outputs of models that are scored within this context in a directory."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def load_or_compute_outputs(
    model: PreTrainedModel,
    fingerprint: Callable[[], str],
    rows: TokenizedRows,
    session: Session,
    compute: Callable[[], list[Array]],
) -> list[Array]:
    """Return a model's outputs for rows, from the directory of `keep_outputs` if it has them.

    Outputs of more than `MAX_FILE_BYTES` are not kept. Neither are the outputs of a run in several
    processes, because `compute` would wait forever for a process that finds the file.

    Args:
        model: The model in PyTorch.
        fingerprint: Returns a hash of the weights and settings that the outputs depend on.
        rows: The tokenised rows.
        session: The device and the compute dtype.
        compute: Computes the outputs, float32 arrays with the same number of dimensions.
    """

    def identity() -> object:
        dtypes = str(model.dtype), str(session.compute_dtype), session.judging
        versions = torch.__version__, transformers.__version__
        return fingerprint(), dtypes, session.device.type, *versions, _hash_of_code(model)

    return stored_outputs(identity, rows, session, compute)


def stored_outputs(
    identity: Callable[[], object],
    rows: TokenizedRows,
    session: Session,
    compute: Callable[[], list[Array]],
) -> list[Array]:
    """Return outputs for rows as `load_or_compute_outputs` does, of anything that computes them.

    Args:
        identity: Returns everything that the outputs depend on besides the rows.
        rows: The tokenised rows.
        session: The session that computes them.
        compute: Computes the outputs.
    """
    folder = _folder.get()
    if folder is None or not len(rows) or session.accelerator.num_processes > 1:
        return compute()
    key = cache_key(OUTPUTS_FORMAT, identity(), hashes_of_tokens(rows))
    file = folder / f"{key}.safetensors"
    stored = _read(file) if file.is_file() else None
    if stored is not None:
        return stored
    outputs = compute()
    if sum(output.nbytes for output in outputs) <= MAX_FILE_BYTES:
        try:
            _write(file, outputs)
        except MachineError as error:
            log(f"outputs are not kept for another goal: {error.message}")
    return outputs


def delete_oldest_outputs(folder: Path, max_bytes: int = MAX_FOLDER_BYTES) -> None:
    """Keep the files in a directory that were used last, up to `max_bytes` in total."""
    total = 0
    try:
        used = [(file.stat(), file) for file in folder.glob("*.safetensors")]
        for status, file in sorted(used, key=lambda each: each[0].st_mtime, reverse=True):
            total += status.st_size
            if total > max_bytes:
                file.unlink()
    except OSError as error:
        log(f"old outputs could not be deleted: {error}")


def _hash_of_code(model: PreTrainedModel) -> str:
    """Return a hash of the file with a model's class; empty if it belongs to transformers."""
    kind = type(model)
    if kind.__module__.partition(".")[0] == transformers.__name__:
        return ""
    return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()


def _write(file: Path, outputs: Sequence[Array]) -> None:
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    values = np.concatenate([output.ravel() for output in outputs]).astype(np.float32, copy=False)
    shapes = np.array([output.shape for output in outputs], np.int64)
    metadata = {DIGEST: _digest(values, shapes)}
    write_atomic(file, save({VALUES: values, SHAPES: shapes}, metadata=metadata))


def _read(file: Path) -> list[Array] | None:
    """Return the outputs in a file, or None after a log line if the file cannot be used."""
    try:
        with safe_open(file, framework="numpy") as stored:
            values, shapes = stored.get_tensor(VALUES), stored.get_tensor(SHAPES)
            digest = (stored.metadata() or {}).get(DIGEST)
        # The files that were used last are kept.
        file.touch()
    except (OSError, SafetensorError) as error:
        log(f"{file} cannot be read ({error}), so these outputs are computed again")
        return None
    if digest != _digest(values, shapes):
        log(f"{file} is damaged (its hash differs), so these outputs are computed again")
        return None
    ends = np.cumsum(shapes.prod(axis=1))
    parts = np.split(values, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _digest(values: Array, shapes: Array) -> str:
    digest = hashlib.sha256(values.data)
    digest.update(shapes.data)
    return digest.hexdigest()
