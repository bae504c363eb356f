"""Hashes of a model: two models with the same hashes compute the same states."""

import hashlib
import inspect
from pathlib import Path

import transformers
from transformers import PreTrainedModel


def weights_hash(model: PreTrainedModel) -> str:
    """Return the SHA-256 of a model in memory.

    The hash covers its configuration and the names, shapes and float32 values of its weights.
    """
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def hash_of_code(model: PreTrainedModel) -> str:
    """Return a hash of the file with a model's class; empty if it belongs to transformers."""
    kind = type(model)
    if kind.__module__.partition(".")[0] == transformers.__name__:
        return ""
    return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
