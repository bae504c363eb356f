"""Rankings in a report: the values of a metric for each query -> means, and paired differences between models."""

from collections.abc import Mapping
from typing import Any

from kdcli.data.labelled.features import Array
from kdcli.metrics.bootstrap import Scorer, differences

Rows = list[dict[str, Any]]


def ranked(
    task: str, split: str, values: Mapping[str, Mapping[str, Array]], resamples: int = 1000
) -> tuple[Rows, Rows]:
    """Evaluations and comparisons as a report takes them. `values`: model -> metric -> its value for each query, [Q];
    the first model is the baseline of the others."""
    baseline, *others = values
    count = len(next(iter(values[baseline].values())))
    rest: dict[str, Any] = {"confusion": None, "per_class": {}, "worst": []}
    evaluations = [
        {
            "model": name,
            "task": task,
            "set": "",
            "split": split,
            "n": count,
            "metrics": _means(of_model),
            **rest,
        }
        for name, of_model in values.items()
    ]
    comparisons = []
    for name in others:
        names = {"model": name, "baseline": baseline, "task": task, "set": ""}
        comparisons += differences(
            names, _scorer(values[name]), _scorer(values[baseline]), count, resamples
        )
    return evaluations, comparisons


def _means(values: Mapping[str, Array]) -> dict[str, float]:
    return {name: float(of_query.mean()) for name, of_query in values.items()}


def _scorer(values: Mapping[str, Array]) -> Scorer:
    return lambda at: _means({name: of_query[at] for name, of_query in values.items()})
