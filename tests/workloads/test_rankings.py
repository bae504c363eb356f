"""The metrics of rerankers against trec_eval, with ties and with grades."""

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from kdcli.workloads.rankings import metrics_by_query, random_order_metrics, ranking_scores


def lists_of(grades):
    """Lists of passages with these grades, as far as the metrics read them."""
    sizes = np.array([len(of_query) for of_query in grades])
    labels = np.concatenate([np.array(of_query, dtype=np.float64) for of_query in grades])
    return SimpleNamespace(sizes=sizes, ends=np.cumsum(sizes), labels=labels)


@given(st.data())
def test_rerankers_are_scored_as_by_trec_eval(data):
    passages = st.lists(st.integers(0, 3), min_size=1, max_size=25).filter(any)
    grades = data.draw(st.lists(passages, min_size=1, max_size=3))
    # Few distinct scores, so that most of them tie.
    scores = [
        data.draw(st.lists(st.integers(0, 3), min_size=len(g), max_size=len(g))) for g in grades
    ]
    found = metrics_by_query(lists_of(grades), np.concatenate(scores).astype(np.float64))
    # trec_eval ranks the larger id first among equal scores. The less relevant passage must win.
    ids = [{n: f"{3 - grade}-{n:02}" for n, grade in enumerate(of_query)} for of_query in grades]
    run = {
        f"q{q}": {ids[q][n]: float(score) for n, score in enumerate(of_query)}
        for q, of_query in enumerate(scores)
    }
    relevance = {
        f"q{q}": {ids[q][n]: grade for n, grade in enumerate(of_query)}
        for q, of_query in enumerate(grades)
    }
    measures = {"ndcg_cut.10", "recip_rank"}
    expected = pytrec_eval.RelevanceEvaluator(relevance, measures).evaluate(run)
    for q in range(len(grades)):
        of_query = expected[f"q{q}"]
        # trec_eval does not cut the reciprocal rank.
        first = of_query["recip_rank"] if of_query["recip_rank"] >= 0.1 else 0.0
        assert found["ndcg@10"][q] == pytest.approx(of_query["ndcg_cut_10"])
        assert found["mrr@10"][q] == pytest.approx(first)


@pytest.mark.parametrize("grades", [[1, 0, 0, 0, 0], [0, 2, 1, 1], [3], [1, 0, -1]])
def test_a_random_order_scores_the_mean_over_all_orders(grades):
    orders = list(permutations(grades))
    scores = np.tile(-np.arange(len(grades), dtype=np.float64), len(orders))
    every = metrics_by_query(lists_of(orders), scores)
    expected = random_order_metrics(lists_of([grades]))
    assert {name: of_query.item() for name, of_query in expected.items()} == pytest.approx(
        {name: of_query.mean() for name, of_query in every.items()}
    )


def test_a_random_order_is_scored_on_ten_places():
    few, many = (random_order_metrics(lists_of([[1] + [0] * n])) for n in (9, 19))
    assert all(many[name] == pytest.approx(of_few / 2) for name, of_few in few.items())


def test_a_model_that_scores_all_passages_alike_gains_nothing():
    found = metrics_by_query(lists_of([[1, 0, 0, 0], [0, 0, 1, 0]]), np.zeros(8))
    assert found["mrr@10"].tolist() == [0.25, 0.25]


def test_a_report_has_the_means_over_the_queries():
    values = {"mrr@10": np.array([0.5, 0.0, 1.0]), "ndcg@10": np.array([0.2, 0.4, 0.9])}
    scores = ranking_scores("own", "test", values)
    (evaluation,) = scores.evaluations
    assert (evaluation.n, scores.counts) == (3, {"": 3})
    assert evaluation.metrics == pytest.approx({"mrr@10": 0.5, "ndcg@10": 0.5})
    assert scores.scorers[""](np.array([2, 2])) == pytest.approx({"mrr@10": 1.0, "ndcg@10": 0.9})
