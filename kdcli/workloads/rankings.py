"""Report rankings: mean metrics over the queries, and paired differences between models."""

from collections.abc import Mapping

from kdcli.data.labelled.features import Array
from kdcli.metrics.bootstrap import Scorer
from kdcli.report.schema import Comparison, Evaluation
from kdcli.workloads.paired import paired_comparisons


def ranked(
    task: str, split: str, values: Mapping[str, Mapping[str, Array]], resamples: int = 1000
) -> tuple[list[Evaluation], list[Comparison]]:
    """Return the evaluation of every model, and its comparison with the first one.

    `values`: model -> metric -> its value for each query, [Q].
    """
    baseline, *others = values
    count = len(next(iter(values[baseline].values())))
    evaluations = [
        Evaluation(model=name, task=task, set="", split=split, n=count, metrics=_means(of_queries))
        for name, of_queries in values.items()
    ]
    comparisons = []
    for name in others:
        scorers = _scorer(values[name]), _scorer(values[baseline])
        comparisons += paired_comparisons((name, baseline), scorers, (task, ""), count, resamples)
    return evaluations, comparisons


def _means(values: Mapping[str, Array]) -> dict[str, float]:
    return {name: float(of_query.mean()) for name, of_query in values.items()}


def _scorer(values: Mapping[str, Array]) -> Scorer:
    return lambda at: _means({name: of_query[at] for name, of_query in values.items()})
