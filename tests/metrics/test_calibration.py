"""Calibration errors and temperatures, next to loops, a grid search and torch."""

import math

import numpy as np
import pytest
import torch

from kdcli.metrics.calibration import (
    calibration_error,
    class_calibration_error,
    fit_class_temperature,
    fit_label_temperature,
    scale_classes,
    scale_labels,
)


def looped_error(confidence, correct, bins=15):
    """Guo et al., equation 3, bin by bin and prediction by prediction."""
    total = 0.0
    for m in range(1, bins + 1):
        inside = [
            (p, y)
            for p, y in zip(confidence, correct, strict=True)
            if (m - 1) / bins < p <= m / bins
        ]
        if inside:
            mean_correct = sum(y for _, y in inside) / len(inside)
            mean_confidence = sum(p for p, _ in inside) / len(inside)
            total += len(inside) / len(confidence) * abs(mean_correct - mean_confidence)
    return total


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def drawn_classes(temperature, n=4000, classes=5, seed=0):
    """Logits, and classes drawn from softmax(logits / temperature)."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(n, classes)) * 3
    chances = softmax(logits / temperature).cumsum(axis=1)
    return logits, (generator.random((n, 1)) > chances).sum(axis=1).clip(max=classes - 1)


def drawn_labels(temperature, n=3000, labels=4, seed=0):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(n, labels)) * 3
    applies = generator.random(logits.shape) < 1 / (1 + np.exp(-logits / temperature))
    return logits, applies.astype(int)


def test_error_is_the_one_of_the_paper():
    generator = np.random.default_rng(1)
    confidence = generator.random(500)
    correct = generator.random(500) < confidence**2
    assert calibration_error(confidence, correct) == pytest.approx(
        looped_error(confidence.tolist(), correct.tolist()), abs=1e-12
    )


def test_a_confidence_at_an_edge_is_in_the_lower_bin():
    # 1/15 closes the first bin, where it shares a bin with 0.01; 1.0 closes the last bin.
    confidence, correct = np.array([1 / 15, 0.01, 1.0]), np.array([1, 0, 1])
    assert calibration_error(confidence, correct) == pytest.approx(
        abs(1 - (1 / 15 + 0.01)) / 3, abs=1e-12
    )


def test_the_error_of_classes_is_about_the_most_likely_one():
    logits, classes = drawn_classes(2.0, n=300)
    probs = softmax(logits)
    rows = [(max(p), int(np.argmax(p) == y)) for p, y in zip(probs.tolist(), classes, strict=True)]
    assert class_calibration_error(probs, classes) == pytest.approx(
        looped_error(*zip(*rows, strict=True)), abs=1e-12
    )


def test_the_error_of_labels_is_about_every_label():
    logits, labels = drawn_labels(2.0, n=200)
    probs = 1 / (1 + np.exp(-logits))
    assert calibration_error(probs, labels) == pytest.approx(
        looped_error(probs.ravel().tolist(), labels.ravel().tolist()), abs=1e-12
    )


def class_loss(logits, classes, temperature):
    total = 0.0
    for row, true in zip((logits / temperature).tolist(), classes.tolist(), strict=True):
        most = max(row)
        total += most + math.log(sum(math.exp(x - most) for x in row)) - row[true]
    return total / len(classes)


def label_loss(logits, labels, temperature):
    scaled = torch.from_numpy(logits / temperature)
    return float(
        torch.nn.functional.binary_cross_entropy_with_logits(
            scaled, torch.from_numpy(labels).double()
        )
    )


@pytest.mark.parametrize("truth", [0.4, 1.0, 2.5])
def test_the_temperature_of_classes_is_the_best_of_a_grid(truth):
    logits, classes = drawn_classes(truth, n=600)
    fitted = fit_class_temperature(softmax(logits), classes)
    losses = {t: class_loss(logits, classes, t) for t in np.arange(0.2, 4.0, 0.01)}
    assert fitted == pytest.approx(min(losses, key=losses.__getitem__), abs=0.006)
    assert class_loss(logits, classes, fitted) <= min(losses.values()) + 1e-12


@pytest.mark.parametrize("truth", [0.4, 2.5])
def test_the_temperature_of_labels_is_the_best_of_a_grid(truth):
    logits, labels = drawn_labels(truth)
    fitted = fit_label_temperature(1 / (1 + np.exp(-logits)), labels)
    losses = {t: label_loss(logits, labels, t) for t in np.arange(0.2, 4.0, 0.01)}
    assert fitted == pytest.approx(min(losses, key=losses.__getitem__), abs=0.006)
    assert label_loss(logits, labels, fitted) <= min(losses.values()) + 1e-12


def test_probabilities_are_scaled_like_logits():
    logits = np.random.default_rng(2).normal(size=(50, 4)) * 5
    np.testing.assert_allclose(
        scale_classes(softmax(logits), 1.7), softmax(logits / 1.7), atol=1e-12
    )
    scaled = scale_labels(1 / (1 + np.exp(-logits)), 1.7)
    np.testing.assert_allclose(scaled, 1 / (1 + np.exp(-logits / 1.7)), atol=1e-9)


def test_without_a_minimum_there_is_no_temperature():
    right, wrong = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[0.1, 0.9], [0.8, 0.2]])
    classes, labels = np.array([0, 1]), np.eye(2, dtype=int)
    # Smaller temperatures are ever better for a model that is always right.
    assert fit_class_temperature(right, classes) is None
    assert fit_label_temperature(right, labels) is None
    # Larger temperatures are ever better for a model that is always wrong.
    assert fit_class_temperature(wrong, classes) is None
    assert fit_label_temperature(wrong, labels) is None


def test_certain_probabilities_stay_finite():
    probs, classes = np.array([[1.0, 0.0], [1.0, 0.0], [0.3, 0.7]]), np.array([0, 1, 1])
    temperature = fit_class_temperature(probs, classes)
    assert temperature is None or math.isfinite(temperature)
    assert np.isfinite(scale_classes(probs, 2.0)).all()
    assert np.isfinite(scale_labels(probs, 2.0)).all()
