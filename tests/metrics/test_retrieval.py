"""Ranking metrics: by hand, against scikit-learn's nDCG, and against trec_eval with ties."""

import numpy as np
import pytest
import pytrec_eval
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.util import SimilarityFunction

from kdcli.errors import UsageError
from kdcli.metrics.retrieval import rank_documents, ranking_metrics, similarities


def trec_eval(run, relevance):
    """trec_eval's metrics. Among equal scores it ranks the larger id first."""
    measures = {"ndcg_cut.10", "recall.10,100", "recip_rank"}
    values = pytrec_eval.RelevanceEvaluator(relevance, measures).evaluate(run)
    return {
        query: {
            "ndcg@10": of_query["ndcg_cut_10"],
            # trec_eval does not cut the reciprocal rank.
            "mrr@10": of_query["recip_rank"] if of_query["recip_rank"] >= 0.1 else 0.0,
            "recall@10": of_query["recall_10"],
            "recall@100": of_query["recall_100"],
        }
        for query, of_query in values.items()
    }


@given(st.data())
def test_rankings_with_ties_score_as_by_trec_eval(data):
    documents = [f"d{n:03}" for n in range(data.draw(st.integers(1, 130)))]
    # Few distinct scores, so that most of them tie, also at the cuts.
    levels = st.lists(st.integers(0, 4), min_size=len(documents), max_size=len(documents))
    queries = ["q0", "q1"]
    scores_QN = np.array([data.draw(levels) for _ in queries], dtype=np.float32)
    grades = st.dictionaries(st.sampled_from(documents), st.integers(0, 3), min_size=1)
    relevance = {
        query: data.draw(grades.filter(lambda judged: any(judged.values()))) for query in queries
    }
    # As trec_eval, rank the larger id first: the order of the documents decides ties.
    largest_first = documents[::-1]
    rankings = rank_documents(scores_QN[:, ::-1], queries, largest_first, relevance, 100)
    run = {
        query: dict(zip(documents, scores.tolist(), strict=True))
        for query, scores in zip(queries, scores_QN, strict=True)
    }
    expected = trec_eval(run, relevance)
    for query, ranking in zip(queries, rankings, strict=True):
        assert len(ranking) == min(100, len(documents))
        assert ranking_metrics(ranking, relevance[query]) == pytest.approx(expected[query])


def plain_metrics(ranked, grades):
    """The definitions, document by document in float64."""
    dcg = best = 0.0
    hits_10 = hits_100 = 0
    reciprocal = 0.0
    relevant = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    for place, document in enumerate(ranked[:100], 1):
        gain = grades.get(document, 0.0)
        if gain <= 0:
            continue
        hits_100 += 1
        if place <= 10:
            hits_10 += 1
            dcg += gain * np.log(2.0) / np.log(place + 1.0)
            reciprocal = reciprocal or 1.0 / place
    for place, grade in enumerate(relevant[:10], 1):
        best += grade * np.log(2.0) / np.log(place + 1.0)
    return {
        "ndcg@10": dcg / best,
        "mrr@10": reciprocal,
        "recall@10": hits_10 / len(relevant),
        "recall@100": hits_100 / len(relevant),
    }


@given(st.data())
def test_metrics_follow_their_definitions_for_any_grades(data):
    """Grades may be fractions, 0 or negative; documents may be without a grade or unranked."""
    documents = [f"d{n}" for n in range(data.draw(st.integers(1, 120)))]
    ranked = data.draw(st.permutations(documents))
    grade = st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.5])
    names = st.sampled_from([*documents, "never ranked", "nor this"])
    grades = data.draw(
        st.dictionaries(names, grade, min_size=1).filter(lambda g: max(g.values()) > 0)
    )
    assert ranking_metrics(ranked, grades) == pytest.approx(plain_metrics(ranked, grades))


def test_the_earlier_document_wins_a_tie():
    scores = np.array([[0.5, 0.9, 0.5, 0.9]])
    ranked = rank_documents(scores, ["q"], ["c", "a", "d", "b"], {}, 3)
    assert ranked == [["a", "b", "c"]]


def test_the_document_with_the_querys_own_id_is_not_ranked_unless_it_is_relevant():
    documents = ["x", "y", "z"]
    scores = np.array([[1.0, 0.5, 0.2]] * 3)
    relevance = {"x": {"y": 1.0}, "y": {"y": 2.0}, "z": {"z": 0.0, "x": 1.0}}
    assert rank_documents(scores, documents, documents, relevance, 2) == [
        ["y", "z"],
        ["x", "y"],
        ["x", "y"],
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(bad):
    with pytest.raises(UsageError, match="1 of 2 scores of documents are not finite"):
        rank_documents(np.array([[0.1, bad]]), ["q"], ["x", "y"], {}, 2)


@pytest.mark.parametrize("function", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_are_those_of_sentence_transformers(function):
    generator = np.random.default_rng(0)
    q_QD, d_ND = (generator.normal(size=(n, 16)).astype(np.float32) for n in (3, 50))
    theirs = SimilarityFunction.to_similarity_fn(function)(torch.tensor(q_QD), torch.tensor(d_ND))
    np.testing.assert_allclose(similarities(q_QD, d_ND, function), theirs.numpy(), atol=1e-5)
