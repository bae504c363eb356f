"""Metrics of tasks that give each example one of C classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.types import Task


def scorer(task: Task, predictions: Sequence[int], references: Sequence[int]) -> Scorer:
    """Score by `accuracy`, `f1`, `macro_f1`, `matthews`, from the counts of each true class with each predicted one.

    `f1` is that of class 1 when there are two, else the same as `macro_f1`, which is the mean over the classes that
    occur, as truth or as prediction. An F1 without anything to find or found is 0, and so is Matthews' correlation
    of a constant.

    Args:
        predictions, references: numbers of classes, [n].

    Raises:
        ValueError: a number that is no class of the task.
    """
    classes = len(task.labels)
    predicted, true = _numbers(predictions, classes), _numbers(references, classes)
    cell = true * classes + predicted

    def score(indices: Array) -> dict[str, float]:
        """Metric → value over the examples of the given numbers, [n] int64, repeated ones counted each time."""
        counts_CC = np.bincount(cell[indices], minlength=classes * classes).reshape(classes, classes)
        return {name: _metric(name, counts_CC.astype(np.float64)) for name in task.metrics}

    return score


def confusion(predictions: Sequence[int], references: Sequence[int], classes: int) -> Array:
    """Counts by true class (row) and predicted class (column), [C, C] int64.

    Raises:
        ValueError: a number that is no class.
    """
    true, predicted = _numbers(references, classes), _numbers(predictions, classes)
    counts: Array = confusion_matrix(true, predicted, labels=np.arange(classes))
    return counts


def per_class(
    predictions: Sequence[int], references: Sequence[int], classes: int
) -> list[tuple[float, float, float, int]]:
    """Precision, recall, F1 and number of true examples of each class; 0 where one is undefined.

    Raises:
        ValueError: a number that is no class.
    """
    true, predicted = _numbers(references, classes), _numbers(predictions, classes)
    columns = precision_recall_fscore_support(true, predicted, labels=np.arange(classes), zero_division=0)
    return [(float(p), float(r), float(f1), int(support)) for p, r, f1, support in zip(*columns, strict=True)]


def f1(found: Array, predicted: Array, true: Array) -> Array:
    """F1 of counts: of those predicted and those that are there, how many are both; 0 where there are none."""
    return 2.0 * found / np.maximum(np.add(predicted, true), 1.0)


def _metric(name: str, counts_CC: Array) -> float:
    """One metric of the counts that `confusion` makes; thousands of resamples take scikit-learn too long."""
    found, predicted, true, n = counts_CC.diagonal(), counts_CC.sum(axis=0), counts_CC.sum(axis=1), counts_CC.sum()
    if name == "accuracy":
        return float(found.sum() / n)
    if name == "matthews":
        # Gorodkin 2004, equation 8: the correlation of the two as indicators.
        spread = (n * n - predicted @ predicted) * (n * n - true @ true)
        return float((found.sum() * n - predicted @ true) / np.sqrt(spread)) if spread else 0.0
    if name == "f1" and len(counts_CC) == 2:
        return float(f1(found, predicted, true)[1])
    if name in ("f1", "macro_f1"):
        return float(f1(found, predicted, true)[predicted + true > 0].mean())
    raise ValueError(f"no metric {name!r} for classes")


def _numbers(given: Any, classes: int) -> Array:
    numbers = np.asarray(given, dtype=np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= classes):
        raise ValueError(f"classes {numbers.min()} … {numbers.max()}, allowed are 0 … {classes - 1}")
    return numbers
