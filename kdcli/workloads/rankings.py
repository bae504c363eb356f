"""Report scores of rankings, computed from the metrics of each query."""

from collections.abc import Mapping, Sequence

import numpy as np

from kdcli.data.labelled.lists import RERANK_TASK, Lists
from kdcli.metrics.retrieval import CUT, ranking_metrics
from kdcli.report.schema import Evaluation
from kdcli.types import Array
from kdcli.workloads.scores import ModelScores

METRICS = RERANK_TASK.metrics
"""The ranking metrics of a query."""


def ranking_scores(
    task: str, split: str, values: Mapping[str, Array], notes: Sequence[str] = ()
) -> ModelScores:
    """Compute the scores of a model from the metrics of its rankings.

    Args:
        task: The task's name in the report.
        split: The evaluation split.
        values: metric -> its value for each query, [Q].
        notes: Notes for the report.
    """
    count = len(next(iter(values.values())))
    evaluation = Evaluation(
        model="", task=task, set="", split=split, n=count, metrics=_means(values)
    )

    def score(at: Array) -> dict[str, float]:
        return _means({name: of_query[at] for name, of_query in values.items()})

    return ModelScores([evaluation], {"": score}, {"": count}, notes=notes)


def _means(values: Mapping[str, Array]) -> dict[str, float]:
    return {name: float(of_query.mean()) for name, of_query in values.items()}


def random_order_metrics(lists: Lists) -> dict[str, Array]:
    """Compute each query's expected metrics of a random order, metric -> values [Q]."""
    ndcg, mrr = [], []
    for begin, end in zip(lists.ends - lists.sizes, lists.ends, strict=True):
        gains = np.maximum(lists.labels[begin:end], 0)
        places = np.arange(1, min(CUT, len(gains)) + 1)
        discounts = 1 / np.log2(places + 1)
        ideal = np.sort(gains)[::-1][: len(places)]
        ndcg.append(gains.mean() * discounts.sum() / (ideal @ discounts))
        left = len(gains) - places + 1
        # The chance that a place has a relevant passage if the places before it have none.
        hits = np.minimum((gains > 0).sum() / left, 1)
        missed = np.cumprod(np.append(1, 1 - hits))[:-1]
        mrr.append((missed * hits / places).sum())
    return dict(zip(METRICS, (np.array(ndcg), np.array(mrr)), strict=True))


def metrics_by_query(lists: Lists, scores_R: Array) -> dict[str, Array]:
    """Compute the ranking metrics of every query, metric -> values [Q].

    Passages with equal scores are sorted by increasing relevance, so that a model does not benefit
    from ties.
    """
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for begin, end in zip(lists.ends - lists.sizes, lists.ends, strict=True):
        order = np.lexsort((lists.labels[begin:end], -scores_R[begin:end]))
        relevance = {str(n): float(label) for n, label in enumerate(lists.labels[begin:end])}
        of_query = ranking_metrics([str(n) for n in order], relevance)
        for name in METRICS:
            values[name].append(of_query[name])
    return {name: np.array(of_query) for name, of_query in values.items()}
