"""Metrics of a ranking, as BEIR and trec_eval define them."""

import math
from collections.abc import Mapping, Sequence

CUT = 10


def ranking_metrics(ranked: Sequence[str], relevance: Mapping[str, float]) -> dict[str, float]:
    """`ndcg@10` with linear gains, `mrr@10`, `recall@10`, `recall@100` of one query. `ranked`: documents, best first;
    `relevance`: document -> grade, relevant above 0; at least one is."""
    grades = [max(0.0, relevance.get(document, 0.0)) for document in ranked]
    ideal = sorted((g for g in relevance.values() if g > 0), reverse=True)
    first = next((place for place, grade in enumerate(grades[:CUT], 1) if grade > 0), None)
    return {
        "ndcg@10": _dcg(grades[:CUT]) / _dcg(ideal[:CUT]),
        "mrr@10": 0.0 if first is None else 1 / first,
        "recall@10": sum(g > 0 for g in grades[:CUT]) / len(ideal),
        "recall@100": sum(g > 0 for g in grades[:100]) / len(ideal),
    }


def _dcg(grades: Sequence[float]) -> float:
    return sum(grade / math.log2(place + 1) for place, grade in enumerate(grades, 1))
