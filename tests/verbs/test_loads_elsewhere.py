"""What is shipped gives equal outputs by other programs: transformers, sentence-transformers, ONNX
Runtime, Node."""

import json
import os
import shutil
import subprocess

import numpy as np
import own_files
import pytest
from huggingface_hub import ModelCard
from scipy.special import softmax
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import pipeline

from kdcli.models.embedder import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder

TEXTS = ["w1 w2 w3 w4", "w21 w22 w20", "w3 w21 w4 w5 w22 w1"]
FEATURES = """
const { pipeline, env } = require("@huggingface/transformers");
env.allowRemoteModels = false;
env.localModelPath = process.argv[2];
(async () => {
  const [task, name, dtype, texts] = process.argv.slice(3);
  const run = await pipeline(task, name, { dtype });
  const pooled = { pooling: "mean", normalize: true };
  const how = task === "feature-extraction" ? pooled : { top_k: null };
  const made = await run(JSON.parse(texts), how);
  console.log(JSON.stringify(made.tolist ? made.tolist() : made));
})();
"""


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    base = load_encoder(str(own_files.encoder(folder / "base", num_hidden_layers=1)))
    save_embedder(
        base.model, base.tokenizer, EmbeddingFormat("mean", normalize=True), folder / "model"
    )
    return folder / "model"


@pytest.fixture(scope="module")
def shipped(embedder, tmp_path_factory):
    """`class` or `vectors` -> the model, and its export with weights."""
    head = own_files.headed(tmp_path_factory.mktemp("head") / "model", labels=own_files.NAMES)
    made = {}
    for kind, model in (("class", head), ("vectors", embedder)):
        folder = tmp_path_factory.mktemp("shipped") / kind
        own_files.succeeds(
            "export", model, "--format", "onnx", "--int8", "--fp16", "--weights", "-o", folder
        )
        made[kind] = model, folder
    return made


def by_file(folder, output, name="model"):
    """ONNX Runtime and tokenizers alone."""
    session = pytest.importorskip("onnxruntime").InferenceSession(folder / "onnx" / f"{name}.onnx")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(TEXTS)
    arrays = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    fed = {
        i.name: np.array([getattr(row, arrays[i.name]) for row in rows])
        for i in session.get_inputs()
    }
    return session.run([output], fed)[0]


def by_node(folder, task, dtype="fp32"):
    """transformers.js, where Node finds it (NODE_PATH)."""
    node = shutil.which("node")
    found = node and subprocess.run(
        [node, "-e", 'require.resolve("@huggingface/transformers")'], capture_output=True
    )
    if not found or found.returncode:
        pytest.skip(
            "needs Node and: npm install --ignore-scripts @huggingface/transformers; "
            "NODE_PATH=node_modules"
        )
    script = folder.parent / "run.cjs"
    script.write_text(FEATURES)
    command = [node, script, f"{folder.parent}/", task, folder.name, dtype, json.dumps(TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_classifier_by_transformers_and_by_onnx_runtime_alone(shipped):
    model, folder = shipped["class"]
    of_model, of_export = (
        pipeline("text-classification", str(f), device="cpu")(TEXTS) for f in (model, folder)
    )
    assert of_model == of_export
    labels = json.loads((folder / "config.json").read_text())["id2label"]
    scores = softmax(by_file(folder, "logits"), axis=-1)
    assert [labels[str(i)] for i in scores.argmax(-1)] == [row["label"] for row in of_model]
    np.testing.assert_allclose(scores.max(-1), [row["score"] for row in of_model], atol=1e-5)


def test_vectors_by_sentence_transformers_and_by_onnx_runtime_alone(shipped):
    model, folder = shipped["vectors"]
    of_model, of_export = (
        SentenceTransformer(str(f), device="cpu").encode(TEXTS) for f in (model, folder)
    )
    np.testing.assert_array_equal(of_model, of_export)
    np.testing.assert_allclose(by_file(folder, "sentence_embedding"), of_model, atol=1e-5)
    np.testing.assert_allclose(
        by_file(folder, "sentence_embedding", "model_fp16"), of_model, atol=1e-2
    )
    assert ((by_file(folder, "sentence_embedding", "model_int8") * of_model).sum(-1) > 0.99).all()


def test_both_by_transformers_js(shipped):
    model, folder = shipped["vectors"]
    expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(by_node(folder, "feature-extraction"), expected, atol=1e-5)
    model, folder = shipped["class"]
    scores = pipeline("text-classification", str(model), device="cpu", top_k=None)(TEXTS)
    for theirs, ours in zip(by_node(folder, "text-classification"), scores, strict=True):
        assert [row["label"] for row in theirs] == [row["label"] for row in ours]
        np.testing.assert_allclose(
            [r["score"] for r in theirs], [r["score"] for r in ours], atol=1e-5
        )


@pytest.mark.parametrize(
    ("kind", "task"), [("class", "text-classification"), ("vectors", "sentence-similarity")]
)
def test_front_matter_is_what_the_hub_reads(shipped, kind, task):
    data = ModelCard.load(shipped[kind][1] / "README.md").data
    assert (data.pipeline_tag, data.library_name) == (task, "transformers.js")
    assert data.base_model is None
