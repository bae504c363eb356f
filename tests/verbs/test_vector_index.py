"""Searches in vectors of documents that another model made, or that are stored in fewer bits."""

import json
from dataclasses import replace

import numpy as np
import own_files
import pytest
from own_files import kdcli, refused, report_of, succeeds

from kdcli.errors import UsageError
from kdcli.metrics.retrieval import similarities
from kdcli.run.context import cpu_session
from kdcli.workloads.beir import RESCORED, document_scorer
from kdcli.workloads.embedder import Embedder

DOCUMENTS = {f"d{n}": f"w{n % 13} w{n % 7} w{n % 5}" for n in range(40)}
QUERIES = {f"q{n}": f"w{n % 13} w{n % 5}" for n in range(12)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    teacher = own_files.embedder(folder / "teacher", num_hidden_layers=2)
    return teacher, own_files.embedder(folder / "student", num_hidden_layers=1)


@pytest.fixture(scope="module")
def beir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beir")
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "qrels").mkdir()
    rows = [f"q{n}\td{n}\t1" for n in range(12)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query\tdocument\tgrade", *rows]))
    return folder


def vectors_of(model, texts):
    return model.vectors(list(texts.values()), "", cpu_session()).astype(np.float64)


def reciprocal_ranks(scores):
    """MRR@10, computed apart from the scores [Q, N]; query n is about document n."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    places = [list(row).index(n) + 1 if n in row else np.inf for n, row in enumerate(order)]
    return np.mean([1 / place for place in places])


def test_queries_search_the_documents_of_another_model(models, beir, tmp_path):
    teacher, student = models
    given = ("evaluate", student, "--task", "retrieval", "--data", beir)
    succeeds(*given, "--documents", teacher, "-o", tmp_path / "model")
    (by_model,) = report_of(tmp_path / "model").evaluations
    opened = [Embedder.open_scored(str(m)) for m in models]
    queries = vectors_of(opened[1], QUERIES)
    expected, own = (reciprocal_ranks(queries @ vectors_of(model, DOCUMENTS).T) for model in opened)
    assert by_model.metrics["mrr@10"] == pytest.approx(expected)
    assert expected != pytest.approx(own)
    assert any("searches" in note for note in report_of(tmp_path / "model").notes)

    vectors = opened[0].vectors(list(DOCUMENTS.values()), "document", cpu_session())
    np.save(tmp_path / "index.npy", vectors)
    succeeds(*given, "--documents", tmp_path / "index.npy", "-o", tmp_path / "file")
    (by_file,) = report_of(tmp_path / "file").evaluations
    assert by_file.metrics == by_model.metrics


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((39, 32), np.float32), "has 39 vectors for 40 documents"),
        (np.ones((40, 31), np.float32), "have 31 numbers, and those of"),
        (np.ones((40, 32), np.int64), "it must hold floats"),
        (np.full((40, 32), np.nan, np.float32), "40 vectors are not finite"),
        (None, "no vectors at"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(models, beir, tmp_path, array, message):
    file = tmp_path / "index.npy"
    if array is not None:
        np.save(file, array)
    words = ("--task", "retrieval", "--data", beir, "--documents", file)
    assert message in refused(tmp_path, "evaluate", models[1], *words)


def test_an_index_is_for_retrieval(models, tmp_path):
    words = ("--task", "stsb", "--documents", models[0])
    assert "for task retrieval, not for stsb" in refused(tmp_path, "evaluate", models[1], *words)


def test_every_way_to_store_documents_is_a_model_of_its_own(models, beir, tmp_path):
    formats = ("--set", "vector_formats=[float32,int8,binary]")
    result = kdcli(
        "evaluate", models[0], "--task", "retrieval", "--data", beir, *formats, "-o", tmp_path / "x"
    )
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "x")
    names = [each.model for each in report.evaluations]
    assert names == ["teacher, float32", "teacher, int8", "teacher, binary"]
    assert len(report.comparisons) == 2 * len(report.evaluations[0].metrics)
    model = Embedder.open_scored(str(models[0]))
    documents, queries = (vectors_of(model, texts) for texts in (DOCUMENTS, QUERIES))
    for each, stored in zip(report.evaluations, ("float32", "int8", "binary"), strict=True):
        expected = reciprocal_ranks(document_scorer(documents, "cosine", stored)(queries))
        assert each.metrics["mrr@10"] == pytest.approx(expected)
    assert report.evaluations[0].metrics != report.evaluations[2].metrics


def vectors(rows, seed, width=16):
    x = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_int8_documents_are_at_most_half_a_level_away(similarity):
    queries, documents = vectors(5, 0), vectors(300, 1)
    exact = similarities(queries, documents, similarity)
    found = document_scorer(documents, similarity, "int8")(queries)
    step = (documents.max(0) - documents.min(0)) / 255
    # The product changes by at most half a level of every component, times the query.
    limit = (np.abs(queries) * step / 2).sum(1, keepdims=True)
    if similarity == "dot":
        assert (np.abs(found - exact) <= limit + 1e-6).all()
    assert np.abs(found - exact).max() < 0.02
    assert not np.array_equal(found, exact)


def test_binary_documents_are_found_by_signs_and_ranked_by_the_query():
    queries, documents = vectors(4, 2), vectors(RESCORED + 200, 3)
    scores = document_scorer(documents, "dot", "binary")(queries)
    signs = np.sign(documents).astype(np.float64)
    for query, found in zip(queries.astype(np.float64), scores, strict=True):
        common = (np.sign(query) * signs).sum(1)
        nearest = np.argsort(-common, kind="stable")
        expected = sorted(nearest[:RESCORED], key=lambda n: -(query @ signs[n]))
        ranked = np.argsort(-found, kind="stable")
        near = [query @ signs[n] for n in ranked[:RESCORED]]
        np.testing.assert_allclose(near, [query @ signs[n] for n in expected], atol=1e-5)
        assert set(ranked[:RESCORED]) == set(nearest[:RESCORED])
        assert list(ranked[RESCORED:]) == list(nearest[RESCORED:])


def test_binary_documents_have_no_distances(models):
    model = Embedder.open_scored(str(models[0]))
    far = replace(model, format=replace(model.format, similarity="euclidean"))
    with pytest.raises(UsageError, match="by euclidean, which binary vectors do not have"):
        far.stored_as("model", ["binary"])
