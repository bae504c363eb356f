"""Probabilities of logits, computed without overflow or loss of precision."""

import numpy as np

from kdcli.types import Array


def sigmoid(logits: Array) -> Array:
    """Return 1 / (1 + exp(-logits))."""
    small = np.exp(-np.abs(logits))
    probs: Array = np.where(logits >= 0, 1.0, small) / (1.0 + small)
    return probs


def logit(probs: Array) -> Array:
    """Return log(probs / (1 - probs)) of probabilities in (0, 1): the inverse of `sigmoid`."""
    # Near 1/2 the quotient is near 1, and its logarithm would lose digits.
    middle = np.abs(probs - 0.5) < 0.2
    near_half = 2.0 * np.arctanh(np.where(middle, 2.0 * (probs - 0.5), 0.0))
    logits: Array = np.where(middle, near_half, np.log(probs / (1.0 - probs)))
    return logits


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probs: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_probs


def softmax(logits: Array) -> Array:
    """Return the softmax over the last axis."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probs
