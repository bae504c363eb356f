"""Metrics of tasks with one of C classes per example."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kdcli.metrics.bootstrap import WeightedScorer
from kdcli.types import Array, Task


def scorer(task: Task, predictions: Sequence[int], references: Sequence[int]) -> WeightedScorer:
    """Score by `accuracy`, `f1`, `macro_f1` and `matthews`.

    `agreement` is the accuracy if the truth is another model's predictions. `f1` is the F1 of class
    1 if there are two classes, and `macro_f1` otherwise. `macro_f1` is the mean over the classes
    that occur as truth or prediction. F1 with a denominator of 0 and Matthews' correlation of a
    constant are 0. `predictions` and `references` are class numbers, [n]. Raises ValueError if a
    number is not a class of the task.
    """
    classes = len(task.labels)
    true_N, predicted_N = (_numbers(each, classes) for each in (references, predictions))
    cell = true_N * classes + predicted_N
    occurrences_C = np.bincount(np.append(true_N, predicted_N), minlength=classes)
    by_class_N = 1 / occurrences_C[true_N] + 1 / occurrences_C[predicted_N]
    of_second_N = (true_N == 1) | (predicted_N == 1)
    weights = {
        "f1": of_second_N if classes == 2 else by_class_N,
        "macro_f1": by_class_N,
        "matthews": by_class_N,
    }
    return WeightedScorer(
        lambda indices: _metrics(_counts(cell[indices], classes).astype(np.float64)), weights.get
    )


def confusion(predictions: Sequence[int], references: Sequence[int], classes: int) -> Array:
    """Return the counts by true class (row) and predicted class (column), [C, C] int64.

    Raises ValueError if a number is not a class.
    """
    cell = _numbers(references, classes) * classes + _numbers(predictions, classes)
    return _counts(cell, classes)


def _counts(cell: Array, classes: int) -> Array:
    return np.bincount(cell, minlength=classes * classes).reshape(classes, classes)


def per_class(
    task: Task, predictions: Sequence[Any], references: Sequence[Any]
) -> dict[str, dict[str, float]]:
    """Return class -> precision, recall, f1 and support, each 0 where undefined.

    For `tokens`, words are counted, and `O` is skipped. For `score` and `span`, the result is
    empty. `predictions` and `references` have the format of `kdcli.metrics.scorer`. Raises
    ValueError if a number is not a class.
    """
    if task.kind not in ("class", "multi", "tokens"):
        return {}
    # scikit-learn takes seconds to import.
    from sklearn.metrics import precision_recall_fscore_support

    names = [name for name in task.labels if task.kind != "tokens" or name != "O"]
    classes: list[Any] = list(range(len(names)))
    if task.kind == "tokens":
        classes = names
        predictions, references = (
            list(itertools.chain.from_iterable(rows)) for rows in (predictions, references)
        )
    elif task.kind == "class":
        for numbers in (predictions, references):
            _numbers(numbers, len(names))
    elif len(names) == 1:
        # scikit-learn reads a single column of indicators as the classes 0 and 1.
        classes = [1]
    *scores, support = precision_recall_fscore_support(
        np.asarray(references), np.asarray(predictions), labels=classes, zero_division=0
    )
    # scikit-learn counts in floats if no prediction is right.
    scores.append(support.astype(int))
    measures = ("precision", "recall", "f1", "support")
    return {
        name: dict(zip(measures, values, strict=True))
        for name, *values in zip(names, *(score.tolist() for score in scores), strict=True)
    }


def f1(hits: Array, predicted: Array, true: Array) -> Array:
    """Return F1, 0 where undefined, from the counts of hits, of predictions and of true labels."""
    return 2.0 * hits / np.maximum(np.add(predicted, true), 1.0)


def _metrics(counts_CC: Array) -> dict[str, float]:
    """Compute the metrics of a confusion matrix.

    scikit-learn is too slow for thousands of resamples.
    """
    hits, n = counts_CC.diagonal(), counts_CC.sum()
    predicted, true = counts_CC.sum(axis=0), counts_CC.sum(axis=1)
    f1_C = f1(hits, predicted, true)
    macro_f1 = f1_C[predicted + true > 0].mean()
    # Gorodkin 2004, equation 8: the correlation of both label sequences as indicators.
    spread = (n * n - predicted @ predicted) * (n * n - true @ true)
    return {
        "accuracy": hits.sum() / n,
        "agreement": hits.sum() / n,
        "f1": f1_C[1] if len(counts_CC) == 2 else macro_f1,
        "macro_f1": macro_f1,
        "matthews": (hits.sum() * n - predicted @ true) / np.sqrt(spread) if spread else 0.0,
    }


def _numbers(values: ArrayLike, classes: int) -> Array:
    numbers = np.asarray(values, dtype=np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= classes):
        raise ValueError(
            f"the classes range from {numbers.min()} to {numbers.max()}, but must be "
            f"between 0 and {classes - 1}"
        )
    return numbers
