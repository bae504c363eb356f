"""Metrics of the `evaluate` library, and kdcli's metrics as an `evaluate.Metric`.

This module is imported only on demand: the `evaluate` library imports `transformers.pipelines`,
which takes seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
from datasets import Features, List, Value
from huggingface_hub import constants

from kdcli.custom_code import custom_code_allowed
from kdcli.disk import is_path
from kdcli.errors import UsageError, raise_machine_error
from kdcli.metrics import scorer
from kdcli.types import Kind, Task

VALUE_FEATURES: dict[Kind, tuple[object, object]] = {
    "class": (Value("int64"), Value("int64")),
    "multi": (List(Value("int64")), List(Value("int64"))),
    "score": (Value("float64"), Value("float64")),
    "tokens": (List(Value("string")), List(Value("string"))),
    "span": (
        {"id": Value("string"), "text": Value("string"), "no_answer": Value("float64")},
        {"id": Value("string"), "answers": List(Value("string"))},
    ),
    "text": (Value("string"), Value("string")),
}
"""Maps the kind of a task to the format of a prediction and of a reference."""

OFFICIAL = "evaluate-metric/"  # owner, on the hub, of the library's own metrics


class TaskMetric(evaluate.Metric):  # type: ignore[misc]
    """The metrics of a kdcli task for a notebook.

    Call `TaskMetric(task).compute(predictions=..., references=...)` with the formats of
    `VALUE_FEATURES`. Nothing is written to disk. `language` is the language of `span` answers, or
    '' for SQuAD's rules.
    """

    def __init__(self, task: Task, language: str = "") -> None:
        self.task, self.language = task, language
        super().__init__(config_name=task.name, keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        predictions, references = VALUE_FEATURES[self.task.kind]
        return evaluate.MetricInfo(
            description=f"{', '.join(self.task.metrics)} of {self.task.name}",
            citation="",
            features=Features({"predictions": predictions, "references": references}),
        )

    def _build_data_dir(self) -> str:
        """Return no directory: the library would create one even with `keep_in_memory`."""
        return ""

    def _compute(
        self, predictions: Sequence[object], references: Sequence[object]
    ) -> dict[str, float]:
        return scorer(self.task, predictions, references, self.language)(np.arange(len(references)))


@dataclass(frozen=True)
class LibraryMetric:
    """A loaded metric of the `evaluate` library, for one task."""

    name: str
    task: Task
    module: evaluate.EvaluationModule

    def compute(
        self, predictions: Sequence[object], references: Sequence[object]
    ) -> dict[str, float]:
        """Return `NAME.KEY` -> value for every finite number that the metric returns.

        `predictions` and `references` have the formats of `VALUE_FEATURES`. A metric of strings
        gets label names (`class`), or the text and the first gold answer (`span`). Raises
        UsageError if the metric takes other formats, fails, or returns no number.
        """
        features = self.module.features
        columns = features[0] if isinstance(features, list) else features
        if getattr(columns.get("predictions"), "dtype", None) == "string":
            predictions = [_string(self.task, value) for value in predictions]
            references = [_string(self.task, value) for value in references]
        try:
            result = self.module.compute(predictions=list(predictions), references=list(references))
            numbers = {k: float(v) for k, v in result.items() if isinstance(v, Real)}
        except Exception as error:  # noqa: BLE001  # the code of a metric can raise anything
            raise_machine_error(error)
            kind = self.task.kind
            hint = (
                f"it gets predictions and references of kind {kind}; see the documentation's page "
                "'kdcli evaluate'"
            )
            raise UsageError(
                f"metric '{self.name}' fails on {self.task.title}: {_message(error)}", hint
            ) from None
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        if not finite:
            raise UsageError(
                f"metric '{self.name}' returns no finite number on {self.task.title}: {result}"
            )
        return {f"{self.name}.{key}": value for key, value in finite.items()}


def load_metrics(
    names: Sequence[str],
    task: Task,
    references: Sequence[Any],
) -> tuple[LibraryMetric, ...]:
    """Load metrics by hub name, script or directory, and try each one on correct predictions.

    Raises UsageError if a metric is not found, is not cached while offline, is named twice, is code
    that is not trusted, or fails.
    """
    # The library would report each load over the network.
    evaluate.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    evaluate.config.HF_EVALUATE_OFFLINE = (
        evaluate.config.HF_EVALUATE_OFFLINE or constants.HF_HUB_OFFLINE
    )
    loaded: dict[str, LibraryMetric] = {}
    for source in names:
        name = Path(source).stem
        if name in loaded:
            raise UsageError(f"two metrics have the name {name}", "give each metric once")
        loaded[name] = LibraryMetric(name, task, _load(source))
        correct = references
        if task.kind == "span":
            correct = [
                {"id": r["id"], "text": _string(task, r), "no_answer": 0.0} for r in references
            ]
        loaded[name].compute(correct, references)
    return tuple(loaded.values())


def _load(source: str) -> evaluate.EvaluationModule:
    is_script = is_path(source) or source.endswith(".py") or source.startswith((".", "/", "~"))
    if is_script and not is_path(source):
        raise UsageError(f"no metric script or directory at {source}")
    if (is_script or "/" in source.removeprefix(OFFICIAL)) and not custom_code_allowed():
        message = f"metric '{source}' is code from outside the evaluate library, so it is not run"
        raise UsageError(message, "read the code, then add --trust-remote-code")
    try:
        return evaluate.load(source, keep_in_memory=True)
    except (FileNotFoundError, ConnectionError):
        message = (
            f"metric '{source}' is neither in the cache of the evaluate library nor on the hub"
        )
        hint = "check the name and the network, or give a script with --trust-remote-code"
        raise UsageError(message, hint) from None
    except Exception as error:  # noqa: BLE001  # the code of a metric can raise anything
        raise_machine_error(error)
        raise UsageError(f"metric '{source}' cannot be loaded: {_message(error)}") from None


def _string(task: Task, value: Any) -> object:
    """Return a prediction or reference as a string, if the task has strings."""
    if task.kind == "span":
        return value["text"] if "text" in value else next(iter(value["answers"]), "")
    return task.labels[value] if task.kind == "class" else value


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
