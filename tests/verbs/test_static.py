"""Static students: the table, its fit, its files, and the verbs that take it."""

import json
import shutil

import numpy as np
import own_files
import pytest
import torch
from clients import fastembed  # noqa: F401
from own_files import refused, report_of, succeeds
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kdcli.data.labelled.features import TokenizedRows
from kdcli.models.embedder import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder
from kdcli.run.context import cpu_session
from kdcli.verbs.distill.static import TokenShares, _ridge, fit_table
from kdcli.workloads.embedder import Embedder

SPECIAL = [0, 1, 2, 3, 4]
TEXTS = [f"w{n % 11} w{n % 7} w{n % 5} w{n % 3}" for n in range(200)]


def rows_of(*texts):
    ids = [np.array(text, np.int32) for text in texts]
    return TokenizedRows(
        ids_T=np.concatenate(ids),
        types_T=None,
        ends=np.cumsum([len(row) for row in ids]),
        labels=None,
        example=np.arange(len(ids)),
        truncated=0,
        pad_id=0,
        kind="score",
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer_file = str(own_files.encoder(folder / "base") / "tokenizer.json")
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(tokenizer_file)
    base = load_encoder(str(folder / "base"))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat(normalize=False), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join(sorted(set(TEXTS))), "utf-8")
    return file


@pytest.fixture(scope="module")
def student(teacher, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("static") / "student"
    short = ("--max-steps", "3", "--set", "measure.latency=false", "--set", "eval.tasks=[]")
    succeeds("distill", teacher, "--to", "static:8", "--data", texts, *short, "-o", folder)
    return folder


def test_shares_of_tokens_leave_out_special_tokens():
    rows = rows_of([2, 9, 9, 5, 3], [2, 5, 3], [2, 3])
    shares = TokenShares.of(rows, np.arange(3), 10, np.array(SPECIAL))
    expected = np.zeros((3, 10))
    expected[0, 9], expected[0, 5], expected[1, 5] = 2 / 3, 1 / 3, 1
    np.testing.assert_allclose(shares.of_texts(torch.eye(10)), expected, atol=1e-7)
    np.testing.assert_allclose(shares.of_tokens(torch.eye(3)), expected.T, atol=1e-7)


def problem(texts=60, vocabulary=24, width=5, seed=0):
    """Random rows, and the same matrix in float64."""
    generator = np.random.default_rng(seed)
    rows = rows_of(*(generator.integers(5, vocabulary, 6) for _ in range(texts)))
    shares = TokenShares.of(rows, np.arange(texts), vocabulary, np.array(SPECIAL))
    targets = torch.nn.functional.normalize(torch.randn(texts, width), dim=-1)
    return shares, shares.of_texts(torch.eye(vocabulary)).double().numpy(), targets


@pytest.mark.parametrize("penalty", [3.0, 0.1, 0.003])
def test_conjugate_gradients_solve_the_ridge_regression(penalty):
    torch.manual_seed(0)
    shares, a, targets = problem()
    weight = (torch.arange(60) % 3 > 0).float()[:, None]
    found = _ridge(shares, targets * weight, penalty, weight, torch.zeros(24, 5))
    w = weight.double().numpy()
    normal = a.T @ (w * a) + penalty * np.eye(24)
    expected = np.linalg.solve(normal, a.T @ (w * targets.double().numpy()))
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


def test_a_table_that_generated_the_targets_is_found_again():
    torch.manual_seed(1)
    shares, _, _ = problem(texts=400)
    truth = torch.randn(24, 5)
    truth[SPECIAL] = 0
    targets = torch.nn.functional.normalize(shares.of_texts(truth), dim=-1)
    start = truth + torch.randn(24, 5)
    start[SPECIAL] = 0
    chosen = torch.arange(400) % 10 == 0

    def cosine(table):
        return float(torch.cosine_similarity(shares.of_texts(table), targets, dim=-1).mean())

    table, penalty, measured = fit_table(start, shares, targets, chosen)
    assert penalty < 1
    assert cosine(start) < 0.8 < 0.95 < measured
    assert cosine(table) == pytest.approx(measured, abs=0.03)
    assert not table[SPECIAL].any()


def test_a_static_student_is_a_model_for_sentence_transformers(student):
    vectors = SentenceTransformer(str(student), device="cpu").encode([*TEXTS[:20], "w1 " * 900])
    assert vectors.shape == (21, 8)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    own = Embedder.open_scored(str(student))
    found = own.vectors([*TEXTS[:20], "w1 " * 900], "", cpu_session())
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    assert {file.name for file in student.glob("model*")} == {"model.safetensors"}
    # Training moved the table, and never the vectors of special tokens.
    assert not own.model.embeddings[SPECIAL].any()
    assert "student undistilled" in {model.name for model in report_of(student).models}


MODEL2VEC = """
import json, sys
from model2vec import StaticModel
print(json.dumps(StaticModel.from_pretrained(sys.argv[1]).encode(json.loads(sys.argv[2])).tolist()))
"""


def test_a_static_student_is_a_model_for_model2vec(fastembed, student):  # noqa: F811
    texts = [*TEXTS[:20], "w3"]
    vectors = fastembed(MODEL2VEC, str(student), json.dumps(texts))
    expected = SentenceTransformer(str(student), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_model_of_model2vec_is_scored(student, tmp_path):
    """Its configuration tells neither the number of tokens nor that of layers."""
    published = shutil.copytree(student, tmp_path / "published")
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": 999}
    (published / "config.json").write_text(json.dumps(config))
    (published / "tokenizer_config.json").unlink()
    first, second = (Embedder.open_scored(str(f)) for f in (student, published))
    session = cpu_session()
    np.testing.assert_array_equal(
        first.vectors(TEXTS[:9], "", session), second.vectors(TEXTS[:9], "", session)
    )


def test_an_export_of_a_static_model_has_the_same_vectors(student, tmp_path):
    succeeds("export", student, "--format", "onnx", "--int8", "-o", tmp_path / "out")
    exported = Embedder.open_scored(str(tmp_path / "out"))
    expected = Embedder.open_scored(str(student)).vectors(TEXTS, "", cpu_session())
    found = exported.vectors(TEXTS, "", cpu_session())
    assert ((found * expected).sum(1) > 0.999).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "static:0"), "cannot have vectors of 0 numbers"),
        (("--to", "static:33"), "cannot have vectors of 33 numbers"),
        (("--to", "static", "--method", "minilm"), "a static student has no layers"),
        (("--to", "static", "--set", "loss.relations_weight=1"), "compare token states"),
        (("--to", "static", "--student", "demo"), "--student: a static student has"),
        (("--to", "statics"), "'statics' is not a shape"),
    ],
)
def test_what_a_static_student_cannot_learn_is_refused(teacher, texts, tmp_path, words, message):
    assert message in refused(tmp_path, "distill", teacher, "--data", texts, *words)


@pytest.mark.parametrize(
    "command",
    [
        ("distill", "STUDENT", "--to", "static:4", "--method", "embedding"),
        ("prune", "STUDENT", "--task", "embedding", "--method", "smp"),
    ],
)
def test_verbs_that_train_layers_refuse_a_static_model(student, texts, tmp_path, command):
    words = [str(student) if word == "STUDENT" else word for word in command]
    assert "is a static model: a table" in refused(tmp_path, *words, "--data", texts)
