"""The masks that the authors of static model pruning publish (https://arxiv.org/abs/2210.06210): one `.npy`.

It holds the bits of all matrices packed one after the other, in the string order of the weights' names: layer 0, 1, 10,
11, 2, …, and in a layer attention output, key, query, value, then feed-forward up and down.
"""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.matrices import matrices


def read_smp(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Read such a file for the model it masks; nothing in it says which that is.

    Returns:
        `Matrix.name` → bool [out, in].

    Raises:
        UsageError: no such file, not an `.npy` of bytes, or of another number of weights than the model's.
    """
    try:
        with path.open("rb") as file:
            packed = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"the mask file {path} cannot be read: {error.strerror}") from None
    except (ValueError, EOFError, SyntaxError, TokenError, MemoryError) as error:
        raise UsageError(f"{path} is no .npy array of bytes, or damaged: {error}") from None
    # Each matrix is a whole number of bytes in the models these files are of.
    parts = sorted(matrices(model), key=lambda m: f"{m.path}.weight")
    sizes = [m.numel for m in parts]
    if packed.dtype != np.uint8 or packed.size * 8 != sum(sizes) or any(n % 8 for n in sizes):
        raise UsageError(
            f"{path} holds {packed.size} values of {packed.dtype}; the {len(parts)} matrices of "
            f"{model.config.model_type} have {sum(sizes)} weights, so {sum(sizes) / 8:g} bytes of uint8 are needed",
            "give the model the mask was made for, for example bert-base-uncased",
        )
    bits = torch.from_numpy(np.unpackbits(packed.reshape(-1)).astype(bool))
    by_name = {m.name: part.view(m.shape) for m, part in zip(parts, torch.split(bits, sizes), strict=True)}
    return {m.name: by_name[m.name] for m in matrices(model)}
