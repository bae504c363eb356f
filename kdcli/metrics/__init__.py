"""Metrics of tasks, one file per kind of task.

`library` adds the metrics of the `evaluate` library.
"""

import importlib
from collections.abc import Sequence

from kdcli.metrics.bootstrap import Scorer, WeightedScorer
from kdcli.types import Array, Task

METRIC_MODULES = {
    "class": "classification",
    "multi": "multilabel",
    "score": "regression",
    "tokens": "tokens",
    "span": "spans",
    "text": "generated_texts",
}
"""Maps the kind of a task to the file with its metrics."""


def scorer(
    task: Task, predictions: Sequence[object], references: Sequence[object], language: str = ""
) -> Scorer:
    """Return the metrics of a task as a function of selected examples.

    A bootstrap calls the function for each of its resamples. The expensive part is done once,
    before the function is returned, so that each call only adds up. It computes the
    metrics that the task names.

    Args:
        task: The task.
        predictions, references: One per example: a class number (`class`); 0 or 1 for each label
            (`multi`); a number (`score`); a list of label names (`tokens`); `{"id", "text",
            "no_answer"}` and `{"id", "answers"}` (`span`); a text (`text`).
        language: Language of the answers of a `span` task; see `kdcli.metrics.spans.score_answer`.

    Raises ValueError if there are no examples, the numbers of predictions and references differ, or
    the format is wrong. Raises UsageError if predictions are not finite or the language has no
    rules. Raises MachineError if a library that the metrics need is not installed.
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(f"{len(predictions)} predictions, {len(references)} references")
    # Import by kind, because SciPy takes seconds that other tasks need not wait for.
    module = importlib.import_module(f"kdcli.metrics.{METRIC_MODULES[task.kind]}")
    extra_arguments = [language] if task.kind == "span" else []
    score_all: Scorer = module.scorer(task, predictions, references, *extra_arguments)

    def score(indices: Array) -> dict[str, float]:
        scores = score_all(indices)
        if unknown := [name for name in task.metrics if name not in scores]:
            raise ValueError(f"no metric {unknown[0]!r} for tasks of kind {task.kind}")
        return {name: float(scores[name]) for name in task.metrics}

    return (
        WeightedScorer(score, score_all.weights) if isinstance(score_all, WeightedScorer) else score
    )
