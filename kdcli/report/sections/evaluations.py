"""What a report says of labelled tasks, as tables of text: scores, differences, confusions and mistakes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kdcli.report.schema import Evaluation, Report
from kdcli.report.text import Listing, cut, names_of, number, signed

MOST_LABELS = 40
"""Rows and columns of a confusion matrix at most."""

MOST_TEXT = 300
"""Characters that are shown of one text of an example."""

MEAN = "mean"
"""Name of the last row of a table by set."""


@dataclass(frozen=True)
class Cell:
    """A cell of a confusion matrix: how many, which share of the row's true class, and whether that is right."""

    count: int
    share: float
    right: bool


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix to show: one row and one column a label, and a sentence when some were left out."""

    labels: list[str]
    rows: list[list[Cell]]
    note: str


@dataclass(frozen=True)
class Badly:
    """An example that a model does badly on, its texts shortened."""

    id: str
    label: str
    predicted: str
    badness: str
    texts: list[str]


def set_name(task: str, part: str) -> str:
    """A task or one of its sets, as `report.quality` names it: `sst2`, `mnli matched`."""
    return f"{task} {part}".strip()


def tasks(report: Report) -> dict[str, list[Evaluation]]:
    """The evaluations of each task, in the order of the report."""
    found: dict[str, list[Evaluation]] = {}
    for evaluation in report.evaluations:
        found.setdefault(evaluation.task, []).append(evaluation)
    return found


def scores(report: Report, model: str | None = None) -> list[Listing]:
    """A table a task: a row a model where it has one set; where it has several a row a set, and their mean.

    Args:
        model: of this one alone.
    """
    of_tasks = {
        task: [e for e in found if model in (None, e.model)]
        for task, found in tasks(report).items()
        if any(model in (None, e.model) for e in found)
    }
    return [_by_set(task, of) if any(e.set for e in of) else _by_model(task, of) for task, of in of_tasks.items()]


def _by_model(task: str, evaluations: list[Evaluation]) -> Listing:
    metrics = names_of(e.metrics for e in evaluations)
    rows = [[e.model, *(number(e.metrics.get(metric)) for metric in metrics), f"{e.n:,}", e.split] for e in evaluations]
    return Listing(task, ["model", *metrics, "examples", "split"], rows)


def _by_set(task: str, evaluations: list[Evaluation]) -> Listing:
    """A column for each metric of each model, named by what of the two there is more than one of."""
    models = list(dict.fromkeys(e.model for e in evaluations))
    metrics = names_of(e.metrics for e in evaluations)
    columns = [(model, metric) for metric in metrics for model in models]
    names = [
        metric if len(models) == 1 else model if len(metrics) == 1 else f"{metric}, {model}"
        for model, metric in columns
    ]
    sets: dict[str, list[Evaluation]] = {}
    for e in evaluations:
        sets.setdefault(e.set, []).append(e)
    values = [
        [next((e.metrics.get(metric) for e in of if e.model == model), None) for model, metric in columns]
        for of in sets.values()
    ]
    rows = [
        [name, *map(number, own), f"{of[0].n:,}", of[0].split]
        for (name, of), own in zip(sets.items(), values, strict=True)
    ]
    rows.append([MEAN, *(number(_mean(column)) for column in zip(*values, strict=True)), "", ""])
    title = task if len(models) == 1 or len(metrics) > 1 else f"{task}, {metrics[0]}"
    return Listing(title, ["set", *names, "examples", "split"], rows, marked=len(rows) - 1)


def _mean(values: Iterable[float | None]) -> float | None:
    """None unless every set has a value: a mean over other sets could not be compared."""
    found = list(values)
    known = [v for v in found if v is not None]
    return float(np.mean(known)) if len(known) == len(found) else None


def comparisons(report: Report) -> Listing | None:
    """The differences between models, a word where an interval excludes zero; None when nothing was compared."""
    if not report.comparisons:
        return None
    rows = [
        [
            f"{set_name(c.task, c.set)} {c.metric}",
            c.model,
            c.baseline,
            signed(c.difference),
            f"{signed(c.low)} to {signed(c.high)}",
            "higher" if c.low > 0 else "lower" if c.high < 0 else "",
        ]
        for c in report.comparisons
    ]
    note = (
        "Difference: model minus baseline on the same examples. Interval: the middle 95 % of bootstrap resamples of "
        "these examples; “higher” or “lower” where it excludes 0. It says nothing of other seeds."
    )
    return Listing("Differences", ["metric", "model", "baseline", "difference", "95 % interval", ""], rows, note)


def per_class(evaluation: Evaluation) -> Listing | None:
    """Precision, recall and F1 of every class; None when the task has no classes."""
    if not evaluation.per_class:
        return None
    rows = [
        [label, number(s.precision), number(s.recall), number(s.f1), f"{s.support:,}"]
        for label, s in evaluation.per_class.items()
    ]
    return Listing("By class", ["class", "precision", "recall", "F1", "examples"], rows)


def matrix(evaluation: Evaluation) -> Matrix | None:
    """The confusion matrix; of more than MOST_LABELS labels those with the most errors, in their own order."""
    confusion = evaluation.confusion
    if confusion is None or not confusion.labels:
        return None
    counts = np.array(confusion.counts, dtype=np.int64)
    totals = counts.sum(1)
    shown, note = np.arange(len(confusion.labels)), ""
    if len(shown) > MOST_LABELS:
        # Missed and mistaken for: both are errors of a class.
        errors = totals + counts.sum(0) - 2 * counts.diagonal()
        shown = np.sort(np.argsort(-errors, kind="stable")[:MOST_LABELS])
        note = f"Of {len(confusion.labels)} classes the {MOST_LABELS} with the most errors."
    rows = [
        [Cell(int(counts[i, j]), float(counts[i, j] / totals[i]) if totals[i] else 0.0, bool(i == j)) for j in shown]
        for i in shown
    ]
    return Matrix([confusion.labels[i] for i in shown], rows, note)


def confusion_listing(shown: Matrix) -> Listing:
    """A confusion matrix as a plain table of counts."""
    rows = [[label, *(str(cell.count) for cell in row)] for label, row in zip(shown.labels, shown.rows, strict=True)]
    return Listing("True class by row, predicted class by column", ["", *shown.labels], rows)


def worst(evaluation: Evaluation) -> list[Badly]:
    """The examples a model does worst on."""
    return [
        Badly(
            m.id,
            cut(m.label, MOST_TEXT),
            cut(m.predicted, MOST_TEXT),
            f"{m.badness:.3g}",
            # More than a pair of texts: the words of one.
            [cut(text, MOST_TEXT) for text in (m.texts if len(m.texts) < 3 else [" ".join(m.texts)])],
        )
        for m in evaluation.worst
    ]


def headline(evaluation: Evaluation) -> str:
    """Which set an evaluation is of, and its metrics, in a line."""
    metrics = ", ".join(f"{metric} {number(value)}" for metric, value in evaluation.metrics.items())
    where = set_name(evaluation.task, evaluation.set)
    return f"{where} ({evaluation.split}, {evaluation.n:,} examples): {metrics}"
