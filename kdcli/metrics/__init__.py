"""Metrics of tasks, one file for each kind of task; `library` brings those of the `evaluate` library."""

import importlib
from collections.abc import Sequence
from typing import Any

from kdcli.metrics.bootstrap import Array, Scorer
from kdcli.types import Task

MODULES = {
    "class": "classification",
    "multi": "multilabel",
    "score": "regression",
    "tokens": "tokens",
    "span": "spans",
}
MODULES |= {"text": "generation"}


def scorer(
    task: Task, predictions: Sequence[Any], references: Sequence[Any], language: str = ""
) -> Scorer:
    """The metrics of a task as a function of selected examples, such as the resamples of a bootstrap. The slow part is
    done here, once; the returned function only adds up. The metrics are those that the task names. `predictions`,
    `references`: `class`: a class number each; `multi`: 0 and 1 for each label; `score`: a number; `tokens`: a list of
    label names; `span`: {"id", "text", "no_answer"} and {"id", "answers"}; `text`: a text. `language`: of the answers
    of a `span` task, see `kdcli.metrics.spans.score_answer`.
    Raises ValueError: none at all, unequal numbers of predictions and references, or a wrong format; UsageError:
    predictions that are not finite, or a language without rules."""
    if len(predictions) != len(references) or not len(references):
        raise ValueError(f"{len(predictions)} predictions, {len(references)} references")
    # Imported by kind: SciPy and seqeval take seconds that other tasks need not wait.
    module = importlib.import_module(f"kdcli.metrics.{MODULES[task.kind]}")
    score_all: Scorer = module.scorer(
        task, predictions, references, *([language] if task.kind == "span" else [])
    )

    def score(indices: Array) -> dict[str, float]:
        scores = score_all(indices)
        if unknown := [name for name in task.metrics if name not in scores]:
            raise ValueError(f"no metric {unknown[0]!r} for tasks of kind {task.kind}")
        return {name: float(scores[name]) for name in task.metrics}

    return score
