"""Measures of quality that need no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate
import numpy as np
from datasets import Features, List, Value

from kdcli.metrics import classification, multilabel, regression, spans, tokens
from kdcli.metrics.bootstrap import Scorer
from kdcli.types import Kind, Task

FORMATS: dict[Kind, tuple[Any, Any]] = {
    "class": (Value("int64"), Value("int64")),
    "multi": (List(Value("int64")), List(Value("int64"))),
    "score": (Value("float64"), Value("float64")),
    "tokens": (List(Value("string")), List(Value("string"))),
    "span": (
        {"id": Value("string"), "text": Value("string"), "no_answer": Value("float64")},
        {"id": Value("string"), "answers": List(Value("string"))},
    ),
}
"""Kind → what one prediction and one reference are."""


def metric_for(task: Task, language: str = "en") -> evaluate.Metric:
    """The metrics of a task as an `evaluate.Metric`, which keeps what it is given in memory.

    `compute(predictions=…, references=…)` returns the metrics that the task names, in that order; the formats are
    those of `FORMATS`.

    Args:
        language: of the answers of a `span` task.
    """
    return TaskMetric(task, language)


def scorer(task: Task, predictions: Sequence[Any], references: Sequence[Any], language: str = "en") -> Scorer:
    """The metrics of a task over any selection of its examples, such as the resamples of a bootstrap.

    What takes long is done here, once; the returned function only adds up.

    Args:
        predictions, references: in the formats of `FORMATS`.
        language: of the answers of a `span` task.

    Raises:
        ValueError: there are none, or not as many predictions as references, or they are not in the format.
        UsageError: the model predicts no numbers, or nothing is known of the language.
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(f"{len(predictions)} predictions, {len(references)} references")
    if task.kind == "class":
        return classification.scorer(task, predictions, references)
    if task.kind == "multi":
        return multilabel.scorer(task, predictions, references)
    if task.kind == "score":
        return regression.scorer(task, predictions, references)
    if task.kind == "tokens":
        return tokens.scorer(task, predictions, references)
    return spans.scorer(task, predictions, references, language)


class TaskMetric(evaluate.Metric):  # type: ignore[misc]
    """All metrics of one task; see `metric_for`."""

    def __init__(self, task: Task, language: str) -> None:
        self.task, self.language = task, language
        super().__init__(config_name=task.name, keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        predictions, references = FORMATS[self.task.kind]
        return evaluate.MetricInfo(
            description=f"{', '.join(self.task.metrics)} of {self.task.name}",
            citation="",
            features=Features({"predictions": predictions, "references": references}),
        )

    def _build_data_dir(self) -> str:
        """Overridden because evaluate makes a directory in the cache even for what stays in memory."""
        return ""

    def _compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        return scorer(self.task, predictions, references, self.language)(np.arange(len(references)))
