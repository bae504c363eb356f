"""Rankings of documents and their metrics, by hand; trec_eval judges those of rerankers."""

import numpy as np
import pytest
import torch
from sentence_transformers.util import SimilarityFunction

from kdcli.errors import UsageError
from kdcli.metrics.retrieval import rank_documents, ranking_metrics, similarities


def test_by_hand():
    found = ranking_metrics(
        ["a", "b", "c", *"defghijkl"], {"b": 1.0, "l": 1.0, "z": 2.5, "a": -1.0}
    )
    ideal = 2.5 + 1 / np.log2(3) + 1 / 2
    wanted = {
        "ndcg@10": 1 / np.log2(3) / ideal,
        "mrr@10": 0.5,
        "recall@10": 1 / 3,
        "recall@100": 2 / 3,
    }
    assert found == pytest.approx(wanted)
    assert ranking_metrics(["x"], {"y": 1.0}) == dict.fromkeys(wanted, 0.0)


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
