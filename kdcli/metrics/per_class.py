"""Scores of every class of a task, as functions of selected examples."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdcli.metrics.bootstrap import Scorer, WeightedScorer
from kdcli.metrics.classification import f1
from kdcli.metrics.tokens import EntitySpan, entities, entity_types
from kdcli.types import Array, Task


class Occurrences(NamedTuple):
    """Occurrences of classes in examples.

    An example is a row (`class`, `multi`) or a sentence (`tokens`). For `tokens`, whole entities
    are counted, so an example may hold a class several times.

    Attributes:
        examples: The index of the example, [K] int64.
        classes: The index of the class, [K] int64.
    """

    examples: Array
    classes: Array


class ClassCounts(NamedTuple):
    """Occurrences of every class in some examples.

    Attributes:
        n: Number of examples.
        hits: Correct predictions of the class.
        predicted: Predictions of the class.
        true: Occurrences of the class in the references.
    """

    n: int
    hits: Occurrences
    predicted: Occurrences
    true: Occurrences


def class_names(task: Task) -> tuple[str, ...]:
    """Return the classes of a task: its labels, or the types of its entities for `tokens`."""
    return entity_types(task.labels) if task.kind == "tokens" else task.labels


def class_metrics(task: Task) -> tuple[str, ...]:
    """Return the metrics that `class_scorer` computes for each class, the main one first."""
    return ("recall", "f1") if task.kind == "class" else ("f1",)


def count_classes(task: Task, predictions: Sequence[Any], references: Sequence[Any]) -> ClassCounts:
    """Count the classes of every example.

    Args:
        task: A task of kind `class`, `multi` or `tokens`.
        predictions, references: One per example, in the format of `kdcli.metrics.scorer`. For
            `multi`, each label is 0 or 1.
    """
    n = len(references)
    if task.kind == "tokens":
        index = {name: i for i, name in enumerate(class_names(task))}
        ours, theirs = (
            [entities(tags, task.labels) for tags in rows] for rows in (predictions, references)
        )
        shared = [a & b for a, b in zip(ours, theirs, strict=True)]
        found = (_entity_occurrences(each, index) for each in (shared, ours, theirs))
        return ClassCounts(n, *found)
    if task.kind == "class":
        predicted_N, true_N = (np.asarray(x, np.int64) for x in (predictions, references))
        all_N = np.arange(n)
        hits_N = np.flatnonzero(predicted_N == true_N)
        return ClassCounts(
            n,
            Occurrences(hits_N, predicted_N[hits_N]),
            Occurrences(all_N, predicted_N),
            Occurrences(all_N, true_N),
        )
    predicted_NC, true_NC = np.asarray(predictions, bool), np.asarray(references, bool)
    marked = (predicted_NC & true_NC, predicted_NC, true_NC)
    return ClassCounts(n, *(Occurrences(*np.nonzero(each_NC)) for each_NC in marked))


def _entity_occurrences(
    sentences: Sequence[set[EntitySpan]], index: Mapping[str, int]
) -> Occurrences:
    cells = [(row, index[name]) for row, spans in enumerate(sentences) for name, _, _ in spans]
    return Occurrences(*np.array(cells, np.int64).reshape(-1, 2).T)


def class_scorer(task: Task, counts: ClassCounts) -> Scorer:
    """Return the metrics of every class as a function of selected examples.

    The function returns `METRIC CLASS` -> value, for the metrics of `class_metrics`. Recall is the
    accuracy of the examples of the class. A metric is 0 where it is undefined.
    """
    names, metrics = class_names(task), class_metrics(task)
    read = {"recall": (counts.true,), "f1": (counts.true, counts.predicted)}
    keys = {f"{metric} {name}": (metric, c) for metric in metrics for c, name in enumerate(names)}

    def weights(key: str) -> Array:
        metric, c = keys[key]
        chosen = [each.examples[each.classes == c] for each in read[metric]]
        return np.bincount(np.concatenate(chosen), minlength=counts.n)

    def score(indices: Array) -> dict[str, float]:
        times_N = np.bincount(indices, minlength=counts.n)
        hits_C, predicted_C, true_C = (
            np.bincount(each.classes, times_N[each.examples], len(names))
            for each in (counts.hits, counts.predicted, counts.true)
        )
        values = {
            "recall": hits_C / np.maximum(true_C, 1.0),
            "f1": f1(hits_C, predicted_C, true_C),
        }
        return {key: float(values[metric][c]) for key, (metric, c) in keys.items()}

    return WeightedScorer(score, weights)


def largest_confusions(counts_CC: Array, limit: int) -> list[tuple[int, int, int]]:
    """Return the largest cells of a confusion matrix that are not on its diagonal.

    Args:
        counts_CC: The confusion matrix.
        limit: Maximum number of cells.

    Returns:
        (row, column, count), the largest count first; equal counts in the order of the cells.
    """
    apart_CC = counts_CC - np.diag(counts_CC.diagonal())
    order = np.argsort(-apart_CC, axis=None, kind="stable")[:limit]
    rows, columns = np.unravel_index(order, apart_CC.shape)
    cells = zip(rows.tolist(), columns.tolist(), apart_CC[rows, columns].tolist(), strict=True)
    return [cell for cell in cells if cell[2] > 0]
