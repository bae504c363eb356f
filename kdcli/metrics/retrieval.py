"""Metrics of a ranking, as BEIR and trec_eval define them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kdcli.metrics.finite import check_finite
from kdcli.types import Array

CUT = 10
RETRIEVAL_METRICS = ("ndcg@10", "mrr@10", "recall@10", "recall@100")
"""The metrics of a ranking. Higher is better for all of them."""


def similarities(q_QD: Array, d_ND: Array, function: str) -> Array:
    """Return the similarity of each query to each document, [Q, N]; larger is more similar.

    `function` is one of sentence-transformers' names. `cosine` and `dot` are products, while
    `euclidean` and `manhattan` are negative distances.
    """
    if function == "manhattan":
        q, d = (torch.from_numpy(np.asarray(x, np.float64)) for x in (q_QD, d_ND))
        manhattan_QN: Array = torch.cdist(q, d, p=1).numpy()
        return -manhattan_QN
    if function == "cosine":
        q_QD, d_ND = of_length_1(q_QD), of_length_1(d_ND)
    products_QN: Array = q_QD @ d_ND.T
    if function != "euclidean":
        return products_QN
    squares_QN = (q_QD**2).sum(1)[:, None] + (d_ND**2).sum(1) - 2 * products_QN
    distances_QN: Array = np.sqrt(np.maximum(squares_QN, 0.0))
    return -distances_QN


def pairwise_similarities(x_ND: Array, y_ND: Array, function: str) -> Array:
    """Return the similarity of each x to its y, [N]. `function` is as in `similarities`."""
    if function == "cosine":
        x_ND, y_ND = of_length_1(x_ND), of_length_1(y_ND)
    if function in ("cosine", "dot"):
        return np.asarray((x_ND * y_ND).sum(1))
    norm = 1 if function == "manhattan" else 2
    return np.asarray(-np.linalg.norm(x_ND - y_ND, ord=norm, axis=1))


def of_length_1(v_ND: Array) -> Array:
    """Scale vectors to length 1. A zero vector stays zero."""
    return np.asarray(v_ND / np.maximum(np.linalg.norm(v_ND, axis=1, keepdims=True), 1e-12))


def rank_documents(
    scores_QN: Array,
    queries: Sequence[str],
    documents: Sequence[str],
    relevance: Mapping[str, Mapping[str, float]],
    top: int,
) -> list[list[str]]:
    """Rank the documents for each query, best first. Among equal scores, the earlier one wins.

    As in BEIR, a query's own document (the document with the query's id) is skipped, because some
    data sets, such as ArguAna and Quora, use their queries as documents. It stays if it is labelled
    as relevant, because then the ids of queries and documents are unrelated.

    Args:
        scores_QN: The score of each document for each query.
        queries, documents: Ids.
        relevance: query -> document -> grade.
        top: Maximum number of documents per query.

    Raises UsageError if a score is not finite.
    """
    check_finite(scores_QN, "scores of documents")
    best_QN = np.argsort(-scores_QN, axis=1, kind="stable")[:, : top + 1]
    rankings = []
    for query, best_N in zip(queries, best_QN, strict=True):
        ranking = [documents[i] for i in best_N]
        if relevance.get(query, {}).get(query, 0.0) <= 0:
            ranking = [document for document in ranking if document != query]
        rankings.append(ranking[:top])
    return rankings


def ranking_metrics(ranked: Sequence[str], relevance: Mapping[str, float]) -> dict[str, float]:
    """Return `ndcg@10` with linear gains, `mrr@10`, `recall@10` and `recall@100` of one query.

    `ranked` holds the documents, best first. `relevance` maps documents to grades. A grade above 0
    means relevant, and at least one document must be relevant.
    """
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
