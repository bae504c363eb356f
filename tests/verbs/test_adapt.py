"""`kdcli adapt`: a new model searches the index of an old one."""

import json
import random
import re

import numpy as np
import onnxruntime
import own_files
import pyarrow as pa
import pytest
from own_files import refused, report_of, succeeds
from pyarrow import parquet
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from kdcli.data.labelled.partition import PartSize, Pools, choose_partition, text_hashes
from kdcli.run.context import cpu_session
from kdcli.verbs.adapt.maps import FOLDS, RIDGES, fit_maps
from kdcli.workloads.embedder import Embedder

COUNT = 500
rng = random.Random(0)
TEXTS = [
    " ".join(f"w{rng.randrange(50)}" for _ in range(rng.randrange(4, 9))) for _ in range(COUNT)
]


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def encode(model, texts=TEXTS):
    return Embedder.open_scored(str(model)).vectors(list(texts), "", cpu_session())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A new model, texts, and an index that is a bent and turned copy of the new vectors."""
    folder = tmp_path_factory.mktemp("adapt")
    own_files.embedder(folder / "new", num_hidden_layers=1)
    own_files.embedder(folder / "other", num_hidden_layers=2)
    (folder / "docs.txt").write_text("\n".join(TEXTS))
    (folder / "new" / "README.md").write_text("---\nlicense: mit\nbase_model: me/new\n---\n")
    np.save(folder / "index.npy", old_vectors(encode(folder / "new")))
    return folder


def old_vectors(x):
    turn = np.random.default_rng(0).normal(size=(x.shape[1], 48))
    return unit(np.tanh(x @ turn / 4)).astype(np.float32)


def adapt(folder, out, *more, index="index.npy", data="docs.txt"):
    words = ("--index", folder / index, "--data", folder / data, "-o", out)
    return succeeds("adapt", folder / "new", *words, *more)


def nearest(queries, documents, own):
    scores = queries.astype(np.float64) @ documents.astype(np.float64).T
    scores[np.arange(len(own)), own] = -np.inf
    return np.argsort(-scores, axis=1)[:, :10]


def rotation(x, y):
    """The scaled rotation of the centred vectors that is closest in float64."""
    x, y = x - x.mean(0), y - y.mean(0)
    u, s, v = np.linalg.svd(x.T @ y, full_matrices=False)
    return s.sum() / np.square(x @ u @ v).sum() * (u @ v)


def ridge_reference(x, y, start):
    """The map and the ridge of a regression whose folds are fitted one by one, in float64."""

    def fit(x, y, ridge):
        mean_x, mean_y = x.mean(0), y.mean(0)
        gram = (x - mean_x).T @ (x - mean_x)
        strength = ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
        wanted = (x - mean_x).T @ (y - mean_y) + strength @ start
        weight = np.linalg.solve(gram + strength, wanted)
        return lambda z: (z - mean_x) @ weight + mean_y

    def error(ridge):
        total = 0.0
        for fold in range(FOLDS):
            out = np.arange(len(x)) % FOLDS == fold
            total += np.square(fit(x[~out], y[~out], ridge)(x[out]) - y[out]).sum()
        return total

    best = min(RIDGES, key=error)
    return fit(x, y, best), best


@pytest.mark.parametrize(("width", "to"), [(12, 7), (7, 12)])
@pytest.mark.parametrize("noise", [1, 8])
def test_maps_are_the_least_squares_solutions_in_float64(width, to, noise):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(403, width)) + 1
    y = np.abs(x @ draw.normal(size=(width, to))) + noise * draw.normal(size=(403, to)) - 2
    orthogonal, linear = fit_maps(x, y)
    turned = (x - x.mean(0)) @ rotation(x, y) + y.mean(0)
    np.testing.assert_allclose(orthogonal(x), turned, atol=1e-4)
    expected, ridge = ridge_reference(x, y, rotation(x, y))
    assert linear.ridge == ridge
    np.testing.assert_allclose(linear(x), expected(x), atol=1e-4)


@pytest.mark.parametrize("encodes", ["queries", "documents"])
def test_the_saved_model_finds_the_neighbours_that_the_report_states(folder, tmp_path, encodes):
    adapt(folder, tmp_path / "out", "--encodes", encodes)
    old, new = np.load(folder / "index.npy"), encode(folder / "new")
    mapped = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encode(tmp_path / "out"), mapped, atol=1e-5)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "onnx" / "model.onnx")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")(
        TEXTS, padding=True, return_tensors="np"
    )
    types = {"token_type_ids": np.zeros_like(tokens["input_ids"])}
    inputs = {each.name: (types | {**tokens})[each.name] for each in session.get_inputs()}
    (vectors,) = session.run(["sentence_embedding"], inputs)
    np.testing.assert_allclose(vectors, mapped, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(mapped, axis=1), 1, atol=1e-5)

    hashes = text_hashes(TEXTS)
    parts = choose_partition(
        Pools(hashes), selection=PartSize(1000, 0.1), verification=PartSize(2000, 0.2), seed=0
    )
    numbers = np.flatnonzero(np.isin(hashes, parts.verification))
    assert len(numbers) == COUNT // 5
    among = numbers if encodes == "documents" else np.arange(COUNT)
    own = np.searchsorted(among, numbers)
    wanted = nearest(new[numbers], new[among], own)
    sides = (old[numbers], mapped[among]) if encodes == "documents" else (mapped[numbers], old)
    pairs = {"adapted": sides, "old model": (old[numbers], old[among])}
    report = report_of(tmp_path / "out")
    rows = {row.model: row for row in report.evaluations}
    for name, (queries, documents) in pairs.items():
        found = nearest(queries, documents, own)
        shares = [len(set(a) & set(b)) / 10 for a, b in zip(found, wanted, strict=True)]
        assert rows[name].metrics["neighbours@10"] == pytest.approx(np.mean(shares), abs=0.002), (
            name
        )
        if name == "adapted":
            assert rows[name].metrics["neighbours@10"] > 0.6
            worst = rows[name].worst[0]
            assert worst.error == pytest.approx(1 - min(shares))
            assert worst.texts == [TEXTS[int(worst.id) - 1]]
    assert rows["re-embedding"].metrics["neighbours@10"] == 1
    # The map has 32 x 48 weights and 48 shifts.
    before, after = (report.cards[name] for name in ("re-embedding", "adapted"))
    assert after.params_total - before.params_total == 33 * 48
    assert after.bytes > before.bytes + 4 * 33 * 48
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card
    assert "base_model: me/new" in card
    assert "# new adapted to an index" in card
    method = {"queries": "encode_query", "documents": "encode_document"}[encodes]
    assert f'directory").{method}(["a text"])' in card
    share, of_old = (100 * rows[name].metrics["neighbours@10"] for name in pairs)
    found = f"finds {share:.1f} % of the 10 nearest texts of re-embedding (95 % interval "
    for file in ("README.md", "report.md"):
        text = (tmp_path / "out" / file).read_text()
        assert found in text
        assert f"; the old model finds {of_old:.1f} %" in text
    (difference,) = (c for c in report.comparisons if c.model == "adapted")
    assert difference.low < difference.difference < difference.high <= 0


def test_queries_with_relevant_documents_are_scored_too(folder, tmp_path):
    beir = tmp_path / "beir"
    queries = {f"q{n}": " ".join(TEXTS[n].split()[:3]) for n in range(40)}
    sets = {"corpus": {f"d{n}": text for n, text in enumerate(TEXTS)}, "queries": queries}
    (beir / "qrels").mkdir(parents=True)
    for name, texts in sets.items():
        lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (beir / f"{name}.jsonl").write_text("\n".join(lines))
    rows = ["query\tdocument\tgrade", *(f"q{n}\td{n}\t1" for n in range(40))]
    (beir / "qrels" / "test.tsv").write_text("\n".join(rows))
    order, vectors = shuffled(np.arange(COUNT)), encode(folder / "other")
    columns = {"_id": [f"d{n}" for n in order], "vector": vectors[order].tolist()}
    parquet.write_table(pa.table(columns), tmp_path / "index.parquet")
    words = ("--index", tmp_path / "index.parquet", "--data", beir, "--encodes", "queries")
    given = ("adapt", folder / "new", *words, "--index-model", folder / "other")
    message = refused(tmp_path, *given, "--set", "data.rows=40")
    assert f"give the documents alone: --data {beir}/corpus.jsonl" in message
    succeeds(*given, "-o", tmp_path / "out")
    of_texts = {name: encode(path) for name, path in models(folder, tmp_path).items()}
    of_queries = {
        name: encode(path, queries.values()) for name, path in models(folder, tmp_path).items()
    }
    sides = {"re-embedding": ("new", "new"), "adapted": ("adapted", "old")}
    for name, (query, document) in sides.items():
        scores = of_queries[query] @ of_texts[document].T
        found = np.argsort(-scores, axis=1, kind="stable")[:, :10]
        recall = np.mean([n in row for n, row in enumerate(found)])
        row = next(
            e
            for e in report_of(tmp_path / "out").evaluations
            if (e.task, e.model) == ("retrieval", name)
        )
        assert row.metrics["recall@10"] == pytest.approx(recall), name
        assert row.metrics["ndcg@10"] > 0


def models(folder, tmp_path):
    return {"new": folder / "new", "old": folder / "other", "adapted": tmp_path / "out"}


def shuffled(vectors):
    return vectors[np.random.default_rng(2).permutation(COUNT)]


BAD = {
    "one row is missing": (lambda v: v[1:], "has 499 vectors for 500 texts"),
    "other order": (shuffled, r"do not belong to the texts: with the best map, [45]\d% of the"),
    "random": (
        lambda v: np.random.default_rng(3).normal(size=v.shape).astype(np.float32),
        "do not belong to the texts",
    ),
    # Rounding errors decide between equal rows.
    "all rows are equal": (lambda v: np.ones_like(v), "the best map, (49|50|51)% of the other"),
    "one number": (lambda v: v[:, :1], "vectors of one number, which cannot be searched"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_index_that_does_not_fit_is_refused(folder, tmp_path, name):
    change, message = BAD[name]
    np.save(tmp_path / "bad.npy", change(np.load(folder / "index.npy")))
    words = ("--index", tmp_path / "bad.npy", "--data", folder / "docs.txt")
    said = refused(tmp_path, "adapt", folder / "new", *words)
    assert re.search(message, said), said


def test_other_requests_that_cannot_be_met_are_refused(folder, tmp_path):
    index, docs = ("--index", folder / "index.npy"), ("--data", folder / "docs.txt")
    given = ("adapt", folder / "new")
    assert "no index given" in refused(tmp_path, *given, *docs)
    assert "no text given" in refused(tmp_path, *given, *index)
    few = refused(tmp_path, *given, *index, *docs, "--set", "data.rows=40")
    assert "40 texts are too few: 28 of them would fit the map" in few
    assert "raise data.rows to at least 64" in few
    said = refused(tmp_path, *given, *index, *docs, "--index-model", folder / "other")
    assert "other did not make" in said
    assert "its vectors have 32 numbers, and the rows 48" in said
    np.save(tmp_path / "new.npy", encode(folder / "new"))
    words = ("--index", tmp_path / "new.npy", *docs, "--index-model", folder / "other")
    assert "the median cosine of its vectors and 50 rows is" in refused(tmp_path, *given, *words)


def test_a_dry_run_checks_the_index_and_estimates_the_time(folder, tmp_path):
    result = adapt(folder, tmp_path / "out", "--dry-run", "--json")
    estimate = json.loads(result.stdout)
    (stage,) = estimate["legs"]
    assert (stage["folder"], stage["steps"]) == (str(tmp_path / "out"), 8)
    assert stage["seconds"] == pytest.approx(COUNT / 64 * stage["seconds_per_step"])
    assert estimate["models"]["re-embedding"]["params_total"] > 0
    assert "encoding 500 texts takes 8 steps of 64 texts" in own_files.said_by(result)
    assert list(tmp_path.iterdir()) == []
    np.save(tmp_path / "bad.npy", np.ones((3, 48), np.float32))
    words = ("--index", tmp_path / "bad.npy", "--data", folder / "docs.txt", "--dry-run")
    refused(tmp_path, "adapt", folder / "new", *words)


def test_rows_of_other_texts_are_logged(folder, tmp_path):
    vectors = np.load(folder / "index.npy")
    vectors[: COUNT // 4] = vectors[: COUNT // 4][::-1]
    np.save(tmp_path / "partly.npy", vectors)
    result = adapt(folder, tmp_path / "out", index=tmp_path / "partly.npy")
    assert "of the rows of" in own_files.said_by(result)
