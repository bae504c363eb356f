"""`kdcli export` of embedding models: files that others load, judged by their vectors."""

import contextlib
import io
import json
import re
import shlex
import shutil
from dataclasses import replace

import numpy as np
import own_files
import pytest
import torch
from huggingface_hub import ModelCard
from own_files import kdcli, refused, report_of, said_by, succeeds, write
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from kdcli.models.embedding_format import EmbeddingFormat
from kdcli.verbs.export.export_check import CheckTexts, ExportCheck
from kdcli.workloads.embedder import Embedder

FORMAT = EmbeddingFormat("cls", layers=(own_files.DENSE,), prompts={"query": "w30 "}, max_length=20)
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11"]
COLUMNS = ["--set", "data.columns={text: a, pair: b}"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A tiny embedding model with every part that a format may have."""
    folder = tmp_path_factory.mktemp("embedder")
    return own_files.embedder(folder / "model", FORMAT, num_hidden_layers=2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    lines = [" ".join(f"w{n % 59}" for n in range(k, 2 * k + 3)) for k in range(30)]
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        ({}, None, {"w1"}),
        ({"query": "w30 "}, None, {"w1", "w30"}),
        ({"query": "w30 ", "document": "w31 "}, "query", {"w30", "w31"}),
        ({"search": "w32 "}, "search", {"w1", "w32"}),
    ],
)
def test_integers_are_chosen_on_texts_with_prompts(embedder, prompts, default, expected):
    model = Embedder.open(str(embedder))
    model = replace(model, format=replace(FORMAT, prompts=prompts, default_prompt=default))
    texts = CheckTexts([], "none", [("w1 w2",)] * 16, "texts")
    batches = ExportCheck(model, None, texts, None).calibration()
    firsts = torch.cat([batch["input_ids"][:, 0] for batch in batches])
    assert set(model.tokenizer.convert_ids_to_tokens(firsts.unique())) == expected


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rows = [
        {"a": f"w{n} w{n + 1}", "b": f"w{n} w{n * 7 % 50}", "label": n % 6 + 0.5} for n in range(40)
    ]
    folder = tmp_path_factory.mktemp("pairs")
    write(folder / "validation.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def beir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beir")
    write(
        folder / "corpus.jsonl",
        [{"_id": f"d{n}", "text": f"w{n} w{n + 1} w{n + 2}"} for n in range(20)],
    )
    write(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"w{n} w{n + 1}"} for n in range(10)])
    (folder / "qrels.tsv").write_text("\n".join(f"q{n}\td{n}\t1" for n in range(10)))
    return folder


@pytest.fixture(scope="module")
def exported(embedder, texts, tmp_path_factory):
    made = {}

    def export(*options):
        if options not in made:
            made[options] = tmp_path_factory.mktemp("exports") / "out"
            succeeds("export", embedder, "--data", texts, "--format", *options, "-o", made[options])
        return made[options]

    return export


@pytest.mark.parametrize(
    ("options", "file"),
    [
        (("onnx",), "onnx/model.onnx"),
        (("openvino",), "openvino/openvino_model.xml"),
        (("openvino", "--int8"), "openvino/openvino_model_qint8_quantized.xml"),
    ],
)
def test_the_directory_is_one_of_sentence_transformers(embedder, exported, tmp_path, options, file):
    folder = exported(*options)
    assert (folder / file).is_file()
    assert json.loads((folder / "export.json").read_text())["outputs"] == [
        "last_hidden_state",
        "sentence_embedding",
    ]
    # The weights are all that SentenceTransformer lacks here.
    whole = shutil.copytree(folder, tmp_path / "whole")
    shutil.copy(embedder / "model.safetensors", whole)
    theirs = SentenceTransformer(str(whole), device="cpu")
    first = SentenceTransformer(str(embedder), device="cpu")
    assert (theirs.prompts["query"], theirs.max_seq_length) == ("w30 ", 20)
    np.testing.assert_allclose(theirs.encode(TEXTS), first.encode(TEXTS), atol=1e-6)
    # Optimum does not install next to kdcli, so its lines are not run here.
    lines = f'SentenceTransformer(".", backend="onnx", model_kwargs={{"file_name": "{file}"}})'
    assert (lines in (folder / "README.md").read_text("utf-8")) == (options[0] == "onnx")
    known = first.encode(EXAMPLES)
    code, printed = run_card(folder)
    assert code.endswith("# cosines\n")
    np.testing.assert_allclose(printed, known @ known.T, atol=2e-2)


EXAMPLES = ["A first text.", "A second and somewhat longer one."]


def run_card(folder):
    """Return the Python code of the card, and what it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    return code, json.loads(printed.getvalue())


@pytest.mark.parametrize(
    ("similarity", "shown"),
    [
        ("cosine", "cosines"),
        ("dot", "dot products"),
        ("euclidean", "distances"),
        ("manhattan", "distances"),
    ],
)
def test_the_card_of_vectors_that_are_not_normalised(tmp_path, similarity, shown):
    kind = EmbeddingFormat(normalize=False, similarity=similarity)
    own_files.embedder(tmp_path / "model", kind, num_hidden_layers=1)
    succeeds("export", tmp_path / "model", "--format", "onnx", "-o", tmp_path / "out")
    vectors = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(EXAMPLES)
    if similarity == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    code, printed = run_card(tmp_path / "out")
    assert code.endswith(f"# {shown}\n")
    differences = vectors[:, None] - vectors[None]
    expected = {
        "euclidean": np.linalg.norm(differences, axis=-1),
        "manhattan": np.abs(differences).sum(axis=-1),
    }
    found = expected.get(similarity, vectors @ vectors.T)
    np.testing.assert_allclose(printed, found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_session_by_hand_gives_the_vectors_under_any_padding(embedder, exported, side):
    runtime = pytest.importorskip("onnxruntime")
    folder = exported("onnx")
    session = runtime.InferenceSession(
        folder / "onnx" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    inputs = tokenizer(
        TEXTS, padding="max_length", max_length=16, return_token_type_ids=True, return_tensors="np"
    )
    (vectors,) = session.run(
        ["sentence_embedding"], {i.name: inputs[i.name] for i in session.get_inputs()}
    )
    if side == "left":
        # The positions of this model count padding, so only the first real token tells.
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        return
    expected = SentenceTransformer(str(embedder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_an_export_has_the_scores_of_its_model(embedder, exported, pairs, beir, tmp_path):
    both = [embedder, exported("openvino")]
    succeeds("evaluate", *both, "--task", "own", "--data", pairs, *COLUMNS, "-o", tmp_path / "a")
    succeeds("evaluate", *both, "--task", "retrieval", "--data", beir, "-o", tmp_path / "b")
    for folder in "ab":
        of_torch, of_file = report_of(tmp_path / folder).evaluations
        assert of_file.metrics == pytest.approx(of_torch.metrics, abs=1e-5)


def test_the_task_judges_the_file_beside_torch(embedder, beir, tmp_path):
    done = succeeds(
        "export",
        embedder,
        *shlex.split(f"--format onnx --int8 --task retrieval --data {beir} -o {tmp_path}/out"),
    )
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    (row,) = facts["scores"]
    assert set(row["file"]) == set(row["torch"]) == {"ndcg@10", "mrr@10", "recall@10", "recall@100"}
    assert (row["n"], row["split"], facts["agreement"]["texts"]) == (10, "test", 30)
    results = ModelCard.load(tmp_path / "out" / "README.md").data.eval_results
    assert {(r.dataset_type, r.dataset_split) for r in results} == {("retrieval", "test")}
    assert {r.metric_type: r.metric_value for r in results} == row["file"]
    assert {c["metric"] for c in facts["comparisons"]} == set(row["file"])
    assert "ndcg@10" in done.stdout
    assert "cosine of the vectors" in done.stdout


@pytest.mark.parametrize("file_format", ["onnx", "openvino"])
def test_products_stay_in_float_where_vectors_would_differ(
    embedder, texts, exported, tmp_path, monkeypatch, file_format
):
    small = json.loads((exported(file_format, "--int8") / "export.json").read_text())
    allowed = small["agreement"]["cosine"] + 0.02 * (1 - small["agreement"]["cosine"])
    monkeypatch.setattr("kdcli.verbs.export.export_check.SAME", allowed)
    given = ["export", embedder, "--data", texts, "--format", file_format, "--int8"]
    result = succeeds(*given, "-o", tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    assert facts["agreement"]["cosine"] >= allowed
    kept = [each["name"] for each in facts["products"] if each["float"]]
    assert kept == [each["name"] for each in facts["products"]][: len(kept)]
    assert 0 < len(kept) < len(facts["products"])
    assert all(name in "".join(result.stdout.split()) for name in kept)
    # One fewer did not hold.
    assert {"in_float": len(kept) - 1, "drop": None, "holds": False} in facts["attempts"]
    assert sum(facts["files"].values()) > sum(small["files"].values())
    monkeypatch.setattr("kdcli.verbs.export.export_check.SAME", 1.1)
    result = kdcli(*given, "-o", tmp_path / "wrong")
    assert (result.exit_code, "with every product in float32" in said_by(result)) == (3, True)
    assert not (tmp_path / "wrong").exists()


def test_a_plain_encoder_needs_a_pooling(embedder, texts, beir, tmp_path):
    base = embedder.parent / "base"
    given = ["export", base, "--format", "onnx"]
    said = refused(tmp_path, *given, "--task", "retrieval", "--data", beir)
    assert "has no head for task retrieval" in said
    succeeds(*given, "--pooling", "mean", "--data", texts, "-o", tmp_path / "pooled")
    assert (tmp_path / "pooled" / "modules.json").is_file()
    succeeds(*given, "--data", texts, "-o", tmp_path / "plain")
    both = [tmp_path / "pooled", tmp_path / "plain"]
    succeeds(
        "evaluate",
        *both,
        *shlex.split(f"--pooling mean --task retrieval --data {beir} -o {tmp_path}/out"),
    )
    assert all(abs(c.difference) < 1e-6 for c in report_of(tmp_path / "out").comparisons)
    assert "pools by cls" in refused(
        tmp_path, "export", embedder, "--format", "onnx", "--pooling", "mean"
    )


def test_a_benchmark_searches_nothing(embedder, beir, tmp_path):
    said = refused(tmp_path, "benchmark", embedder, "--task", "retrieval", "--data", beir)
    assert "--task retrieval is for kdcli evaluate" in said
