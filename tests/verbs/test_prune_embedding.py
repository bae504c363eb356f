"""`kdcli prune EMBEDDER --task embedding`: masks learned for vectors, saved as embedding models."""

import shlex

import numpy as np
import own_files
import pytest
import torch
from own_files import refused, report_of, succeeds, write
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from kdcli.deploy.sparse.mask_file import read_mask
from kdcli.models.embedding_format import EmbeddingFormat, dense_layer
from kdcli.models.model import training_rows, write_training_rows

DENSE = dense_layer(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
FORMAT = EmbeddingFormat("cls", layers=(DENSE,), prompts={"query": "w30 "}, max_length=20)
TEXTS = ["w1 w2 w3", "w4 w9", "w5 w6 w7 w8 w9 w10 w11"]
QUICK = shlex.split(
    "--task embedding --max-steps 6 --batch-size 8 --dtype fp32 "
    "--set train.eval_every=3 --set train.checkpoint_every=2 "
    "--set measure.latency=false --set train.log_every=1"
)


@pytest.fixture
def embedder(tmp_path):
    own_files.embedder(tmp_path / "model", FORMAT, num_hidden_layers=2)
    write_training_rows(tmp_path / "model", np.arange(3, dtype=np.uint64))
    return tmp_path / "model"


@pytest.fixture
def given(embedder, tmp_path):
    rng = np.random.default_rng(0)
    lines = [
        " ".join(f"w{n}" for n in rng.integers(0, 59, size=rng.integers(3, 10))) for _ in range(80)
    ]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    return ["prune", embedder, "--data", tmp_path / "texts.txt", *QUICK]


def vectors(folder, **how):
    return SentenceTransformer(str(folder), device="cpu", **how).encode(TEXTS)


def test_masks_are_learned_without_labels_and_the_model_stays_one(given, embedder, tmp_path):
    write(
        tmp_path / "corpus.jsonl",
        [{"_id": f"d{n}", "text": f"w{n} w{n + 1} w{n + 2}"} for n in range(20)],
    )
    write(
        tmp_path / "queries.jsonl", [{"_id": f"q{n}", "text": f"w{n} w{n + 1}"} for n in range(10)]
    )
    (tmp_path / "qrels.tsv").write_text("\n".join(f"q{n}\td{n}\t1" for n in range(10)))
    judge = ["--eval-task", "retrieval", "--set", f"eval.source={tmp_path}"]
    out = tmp_path / "out"
    succeeds(*given, "--sparsity", "0.5", *judge, "-o", out)
    report = report_of(out)
    on_retrieval = [e.model for e in report.evaluations if e.reference == "labels"]
    assert on_retrieval == ["dense", "masked", "compact"]
    kept = report.quality["cosine to the dense model's vectors, held-out texts"]
    assert -1 <= kept["masked"]["least"] <= kept["masked"]["mean"] < 1
    assert kept["masked"] == pytest.approx(kept["compact"], abs=1e-4)
    assert report.pruning[0].density == pytest.approx(0.5, abs=0.01)
    # Weights are the base's, or zero.
    before, after = own_files.weights(embedder), own_files.weights(out)
    for name, weight in after.items():
        assert torch.equal(weight, torch.where(weight == 0, 0, before[name])), name
    masked = vectors(out)
    assert masked.shape == (3, 8)
    np.testing.assert_allclose(vectors(out / "compact", trust_remote_code=True), masked, atol=1e-5)
    assert SentenceTransformer(str(out), device="cpu").prompts["query"] == "w30 "
    assert AutoModel.from_pretrained(out).config.num_hidden_layers == 2
    assert (training_rows(str(out)) == np.arange(3)).all()
    assert read_mask(out / "mask" / "mask.safetensors").info.metrics.keys() == {
        "ndcg@10",
        "mrr@10",
        "recall@10",
        "recall@100",
    }
    # The mask alone makes the same embedding models again.
    for verb in ("apply", "compact"):
        succeeds("mask", verb, out / "mask" / "mask.safetensors", "-o", tmp_path / verb)
        again = vectors(tmp_path / verb, trust_remote_code=verb == "compact")
        np.testing.assert_allclose(again, masked, atol=1e-5)
    succeeds(
        "mask",
        "apply",
        out / "mask" / "scores.safetensors",
        *shlex.split(f"--sparsity 0.8 -o {tmp_path}/sparser"),
    )
    assert (tmp_path / "sparser" / "1_Pooling" / "config.json").is_file()
    both = [embedder, out / "compact"]
    succeeds(
        "evaluate", *both, "--task", "retrieval", "--data", tmp_path, "-o", tmp_path / "judged"
    )
    assert report_of(tmp_path / "judged").evaluations[1].metrics == report.evaluations[2].metrics
    succeeds(
        "export",
        out / "compact",
        *shlex.split(f"--format onnx --data {tmp_path}/texts.txt -o {tmp_path}/file"),
    )
    assert (tmp_path / "file" / "onnx" / "model.onnx").is_file()


def test_a_mask_keeps_the_pooling_that_its_base_does_not_name(given, tmp_path):
    given[1] = tmp_path / "base"
    succeeds(*given, "--sparsity", "0.5", "--pooling", "cls", "-o", tmp_path / "out")
    succeeds(
        "mask", "apply", tmp_path / "out" / "mask" / "mask.safetensors", "-o", tmp_path / "again"
    )
    assert np.array_equal(vectors(tmp_path / "again"), vectors(tmp_path / "out"))


def test_agreement_needs_two_texts(given, embedder, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    assert "only 1 text to score" in refused(tmp_path, *given, "--sparsity", "0.5")
    data = ["--data", tmp_path / "texts.txt", "--set", "data.judged_rows=1"]
    evaluated = ["evaluate", embedder, embedder, "--task", "embedding", *data]
    assert "only 1 text to score" in refused(tmp_path, *evaluated)


@pytest.mark.parametrize(
    "columns",
    ["{text: [queue, body]}", "{label: queue}", "{txt: body}"],
)
def test_text_has_one_column(given, embedder, tmp_path, columns):
    data = ["--data", tmp_path / "texts.txt", "--set", f"data.columns={columns}"]
    for start in (given, ["evaluate", embedder, "--task", "embedding"]):
        message = refused(tmp_path, *start, *data)
        assert "texts are read from one column" in message
        assert ("add --task own" in message) == ("label" in columns)


def test_the_named_column_is_read(given, embedder, tmp_path):
    lines = (tmp_path / "texts.txt").read_text("utf-8").splitlines()
    rows = [{"queue": f"w{n}", "wording": line} for n, line in enumerate(lines)]
    data = ["--data", own_files.write(tmp_path / "rows.jsonl", rows)]
    words = ["evaluate", embedder, embedder, "--task", "embedding", *data]
    assert "which column holds the text?" in refused(tmp_path, *words)
    succeeds(*words, "--set", "data.columns.text=wording", "-o", tmp_path / "out")


def test_methods_that_train_the_weights_leave_no_mask_file(given, tmp_path):
    succeeds(*given, "--sparsity", "0.5", "--method", "magnitude", "-o", tmp_path / "out")
    assert not (tmp_path / "out" / "mask").exists()
    assert vectors(tmp_path / "out").shape == (3, 8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "keep=best"], "keep: best needs a metric during training"),
        (["--set", "loss.hidden_weight=1.0"], "work with kdcli distill, not with prune"),
        (
            ["--eval-task", "stsb", "--task", "sst2"],
            "--eval-task is for --task embedding, not for task sst2",
        ),
    ],
)
def test_mistakes_are_refused(given, tmp_path, more, message):
    assert message in refused(tmp_path, *given, *more)
