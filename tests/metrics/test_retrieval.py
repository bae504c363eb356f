"""Ranking metrics: by hand, and against scikit-learn's nDCG."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from kdcli.metrics.retrieval import ranking_metrics


def test_by_hand():
    found = ranking_metrics(["a", "b", "c", *"defghijkl"], {"b": 1.0, "l": 1.0, "z": 2.0, "a": 0.0})
    ideal = 2 + 1 / np.log2(3) + 1 / 2
    wanted = {
        "ndcg@10": 1 / np.log2(3) / ideal,
        "mrr@10": 0.5,
        "recall@10": 1 / 3,
        "recall@100": 2 / 3,
    }
    assert found == pytest.approx(wanted)
    assert ranking_metrics(["x"], {"y": 1.0}) == dict.fromkeys(wanted, 0.0)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=30).filter(any),
    st.randoms(use_true_random=False),
)
def test_ndcg_is_scikit_learns(grades, random):
    documents = [str(n) for n in range(len(grades))]
    random.shuffle(ranked := list(documents))
    found = ranking_metrics(ranked, {d: float(g) for d, g in zip(documents, grades, strict=True)})
    scores = [[-ranked.index(d) for d in documents]]
    assert found["ndcg@10"] == pytest.approx(ndcg_score([grades], scores, k=10))
