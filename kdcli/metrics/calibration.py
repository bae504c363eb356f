"""Expected calibration error and temperature scaling.

Guo et al. 2017, "On Calibration of Modern Neural Networks", https://arxiv.org/abs/1706.04599.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import expit, log_softmax, logit

from kdcli.types import Array

CALIBRATION_BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""The temperatures that `fit_temperature` searches."""
BISECTIONS = 60
SMALLEST = np.finfo(np.float64).tiny
"""Probabilities below this are raised to it before their logarithm is taken."""


def calibration_error(confidence: Array, correct: Array) -> float:
    """Compute the expected calibration error with 15 bins of equal width.

    Guo et al., equation 3: sum over the bins of (share of the predictions in the bin) times
    |mean of `correct` - mean of `confidence`|. Bin m of M holds the confidences in ((m-1)/M, m/M].

    Args:
        confidence: Probability of each prediction, any shape. For independent labels, every pair of
            a row and a label is one prediction.
        correct: 1 where the prediction is correct, else 0; the same shape.
    """
    confidence, correct = confidence.ravel(), correct.ravel().astype(np.float64)
    inner_edges = np.linspace(0.0, 1.0, CALIBRATION_BINS + 1)[1:-1]
    bins = np.digitize(confidence, inner_edges, right=True)
    gaps = np.bincount(bins, correct - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def class_calibration_error(probs_NC: Array, classes_N: Array) -> float:
    """Compute the calibration error of the most likely class of each row.

    Args:
        probs_NC: Class probabilities.
        classes_N: The reference class of each row.
    """
    predicted_N = probs_NC.argmax(axis=1)
    return calibration_error(probs_NC.max(axis=1), predicted_N == classes_N)


def scale_classes(probs_NC: Array, temperature: float) -> Array:
    """Return softmax(logits / temperature) from the probabilities softmax(logits), [N, C]."""
    scaled: Array = np.exp(log_softmax(_log(probs_NC) / temperature, axis=-1))
    return scaled


def scale_labels(probs_NC: Array, temperature: float) -> Array:
    """Return sigmoid(logits / temperature) from the probabilities sigmoid(logits), [N, C]."""
    scaled: Array = expit(_logits(probs_NC) / temperature)
    return scaled


def fit_class_temperature(probs_NC: Array, classes_N: Array) -> float | None:
    """Fit the temperature of a softmax; see `fit_temperature`.

    Args:
        probs_NC: Class probabilities.
        classes_N: The reference class of each row.
    """
    log_probs_NC = _log(probs_NC)
    true_N = log_probs_NC[np.arange(len(classes_N)), classes_N]

    def slope(inverse: float) -> float:
        scaled_NC = np.exp(log_softmax(inverse * log_probs_NC, axis=-1))
        return float(((scaled_NC * log_probs_NC).sum(axis=1) - true_N).mean())

    return fit_temperature(slope)


def fit_label_temperature(probs_NC: Array, labels_NC: Array) -> float | None:
    """Fit one temperature for independent labels; see `fit_temperature`.

    Args:
        probs_NC: Label probabilities.
        labels_NC: 1 where the label applies, else 0.
    """
    logits_NC = _logits(probs_NC)
    return fit_temperature(
        lambda inverse: float((logits_NC * (expit(inverse * logits_NC) - labels_NC)).mean())
    )


def fit_temperature(slope: Callable[[float], float]) -> float | None:
    """Find the temperature T > 0 with the smallest negative log likelihood of logits / T.

    The negative log likelihood is convex in 1 / T, so bisection of its derivative finds the
    minimum.

    Args:
        slope: Derivative of the negative log likelihood with respect to 1 / T, as a function of
            1 / T.

    Returns:
        The temperature. None if the minimum is not between 0.01 and 100, for example because every
        prediction is correct, so that ever smaller temperatures are better.
    """
    low, high = np.log(1 / MAX_TEMPERATURE), np.log(1 / MIN_TEMPERATURE)
    if slope(float(np.exp(low))) >= 0 or slope(float(np.exp(high))) <= 0:
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if slope(float(np.exp(middle))) < 0:
            low = middle
        else:
            high = middle
    return float(np.exp(-(low + high) / 2))


def _log(probs: Array) -> Array:
    logs: Array = np.log(np.maximum(probs, SMALLEST))
    return logs


def _logits(probs: Array) -> Array:
    largest = 1 - np.finfo(np.float64).epsneg
    logits: Array = logit(np.clip(probs, SMALLEST, largest))
    return logits
