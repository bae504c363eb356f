"""Metrics of tasks with one of C classes for each example."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.types import Task


def scorer(task: Task, predictions: Sequence[int], references: Sequence[int]) -> Scorer:
    """Score by `accuracy`, `f1`, `macro_f1`, `matthews`. `f1` is that of class 1 for two classes, else `macro_f1`: the
    mean over the classes that occur as truth or prediction. F1 with a denominator of 0 and Matthews' correlation of a
    constant are 0. `predictions`, `references`: class numbers, [n]. Raises ValueError: a number that is no class of the
    task."""
    classes = len(task.labels)
    cell = _numbers(references, classes) * classes + _numbers(predictions, classes)
    return lambda indices: _metrics(_counts(cell[indices], classes).astype(np.float64))


def confusion(predictions: Sequence[int], references: Sequence[int], classes: int) -> Array:
    """Counts by true class (row) and predicted class (column), [C, C] int64. Raises ValueError: a number that is no
    class."""
    return _counts(
        _numbers(references, classes) * classes + _numbers(predictions, classes), classes
    )


def _counts(cell: Array, classes: int) -> Array:
    return np.bincount(cell, minlength=classes * classes).reshape(classes, classes)


def per_class(
    task: Task, predictions: Sequence[Any], references: Sequence[Any]
) -> dict[str, dict[str, float]]:
    """Class -> precision, recall, f1 and support, 0 where undefined; {} for `score` and `span`. `predictions`,
    `references`: as in `kdcli.metrics.scorer`; of `tokens` the words are counted, without `O`. Raises ValueError: a
    number that is no class."""
    names = [name for name in task.labels if task.kind != "tokens" or name != "O"]
    if task.kind == "class":
        counts = confusion(predictions, references, len(names))
        columns: Any = counts.diagonal(), counts.sum(axis=0), counts.sum(axis=1)
    elif task.kind == "multi":
        predicted, true = np.asarray(predictions), np.asarray(references)
        columns = (predicted * true).sum(axis=0), predicted.sum(axis=0), true.sum(axis=0)
    elif task.kind == "tokens":
        predicted, true = (
            np.array([tag for tags in rows for tag in tags]) for rows in (predictions, references)
        )
        columns = zip(
            *(((predicted == n) & (true == n), predicted == n, true == n) for n in names),
            strict=True,
        )
        columns = [[int(np.sum(of_label)) for of_label in column] for column in columns]
    else:
        return {}
    return {
        name: {
            "precision": f / max(p, 1),
            "recall": f / max(t, 1),
            "f1": 2 * f / max(p + t, 1),
            "support": int(t),
        }
        for name, f, p, t in zip(names, *(map(float, column) for column in columns), strict=True)
    }


def f1(found: Array, predicted: Array, true: Array) -> Array:
    """F1 of counts: both predicted and true, predicted, true; 0 where there are none."""
    return 2.0 * found / np.maximum(np.add(predicted, true), 1.0)


def _metrics(counts_CC: Array) -> dict[str, float]:
    """The metrics of a confusion matrix; scikit-learn is too slow for thousands of resamples."""
    found, predicted, true, n = (
        counts_CC.diagonal(),
        counts_CC.sum(axis=0),
        counts_CC.sum(axis=1),
        counts_CC.sum(),
    )
    f1_C = f1(found, predicted, true)
    macro_f1 = f1_C[predicted + true > 0].mean()
    # Gorodkin 2004, equation 8: the correlation of the two as indicators.
    spread = (n * n - predicted @ predicted) * (n * n - true @ true)
    return {
        "accuracy": found.sum() / n,
        "f1": f1_C[1] if len(counts_CC) == 2 else macro_f1,
        "macro_f1": macro_f1,
        "matthews": (found.sum() * n - predicted @ true) / np.sqrt(spread) if spread else 0.0,
    }


def _numbers(values: Any, classes: int) -> Array:
    numbers = np.asarray(values, dtype=np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= classes):
        raise ValueError(
            f"classes {numbers.min()} to {numbers.max()}, allowed are 0 to {classes - 1}"
        )
    return numbers
