"""Keep the outputs of scored models on disk, so that each model reads the same rows only once.

A file holds the outputs of one model for one set of rows. Its name is a hash of everything that the
outputs depend on: the model's weights, configuration and code, the tokens of the rows, the dtypes,
the kind of device, and the versions of torch and transformers. Another model, other rows or another
maximum length therefore have another file.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from kdcli.data.labelled.features import TokenizedRows
from kdcli.disk import cache_key
from kdcli.engine.session import Session
from kdcli.kept import Result, keeper_for
from kdcli.models.identity import hash_of_code
from kdcli.targets.cache import hashes_of_tokens
from kdcli.types import Array

OUTPUTS_FORMAT = 3  # incremented when the format of the files changes
VALUES, SHAPES = "values", "shapes"


def load_or_compute_outputs(
    model: PreTrainedModel,
    fingerprint: Callable[[], str],
    rows: TokenizedRows,
    session: Session,
    compute: Callable[[], list[Array]],
) -> list[Array]:
    """Return a model's outputs for rows, from the directory of `keep_results` if it has them.

    Large outputs are not kept. Neither are the outputs of a run in several processes, because
    `compute` would wait forever for a process that finds the file.

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
        return fingerprint(), dtypes, session.device.type, *versions, hash_of_code(model)

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
    keeper = keeper_for()
    if keeper is None or not len(rows) or session.accelerator.num_processes > 1:
        return compute()
    key = cache_key(OUTPUTS_FORMAT, identity(), hashes_of_tokens(rows))
    if (stored := keeper.load(key)) is not None:
        values, shapes = stored.arrays[VALUES], stored.arrays[SHAPES]
        ends = np.cumsum(shapes.prod(axis=1))
        parts = np.split(values, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    began = time.monotonic()
    outputs = compute()
    if keeper_for(sum(output.nbytes for output in outputs)) is not None:
        values = np.concatenate([output.ravel() for output in outputs])
        shapes = np.array([output.shape for output in outputs], np.int64)
        arrays = {VALUES: values.astype(np.float32, copy=False), SHAPES: shapes}
        keeper.store(key, Result(arrays), time.monotonic() - began)
    return outputs
