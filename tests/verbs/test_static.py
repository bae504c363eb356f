"""Static students: the table, its fit, its files, and the verbs that take it."""

import json
import re
import shutil

import numpy as np
import own_files
import pytest
import torch
from clients import fastembed  # noqa: F401
from own_files import refused, report_of, said_by, succeeds
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kdcli.deploy.predict import Predictor
from kdcli.models.embedding_format import EmbeddingFormat, dense_layer
from kdcli.run.context import cpu_session
from kdcli.workloads.embedder import Embedder

SPECIAL = [0, 1, 2, 3, 4]
TEXTS = [f"w{n % 11} w{n % 7} w{n % 5} w{n % 3}" for n in range(200)]


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
    fmt = EmbeddingFormat(normalize=False)
    return own_files.embedder(folder / "model", fmt, base=folder / "base")


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


def test_the_start_is_near_the_teacher_before_any_training(teacher, texts, tmp_path):
    """Few texts and words, so a linear map of the words' vectors nearly gives the texts'."""
    words = ("--set", "measure.latency=false", "--set", "eval.tasks=[]", "--max-steps", "1")
    result = succeeds(
        "distill", teacher, "--to", "static", "--data", texts, *words, "-o", tmp_path / "out"
    )
    (cosine,) = re.findall(r"texts that were left out: (\d\.\d+)", said_by(result))
    assert float(cosine) > 0.9
    model = Embedder.open_scored(str(tmp_path / "out"))
    assert model.model.config.hidden_size == 32


def test_a_static_student_learns_the_cosines_of_a_batch_too(student):
    last = report_of(student).curve[-1]
    assert {"vectors", "pairs"} <= last.held_out["student"].keys()


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


def test_a_text_without_words_has_no_direction(student, tmp_path):
    model = Embedder.open_scored(str(student))
    texts = ["", "w1", "   "]
    vectors = model.vectors(texts, "", cpu_session())
    assert not vectors[[0, 2]].any()
    assert not model.vectors([""], "", cpu_session()).any()
    np.testing.assert_allclose(
        vectors, SentenceTransformer(str(student), device="cpu").encode(texts), atol=1e-6
    )
    succeeds("export", student, "--format", "onnx", "-o", tmp_path / "out")
    exported = Embedder.open_scored(str(tmp_path / "out"))
    np.testing.assert_allclose(exported.vectors([""], "", cpu_session()), 0, atol=1e-6)


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


def test_special_tokens_of_a_published_model_do_not_count(student, teacher, tmp_path):
    """Its tokenizer.json may frame texts, but sentence-transformers ignores that."""
    published = shutil.copytree(student, tmp_path / "published")
    shutil.copy(teacher / "tokenizer.json", published)
    # kdcli's own students have zeros there.
    table = own_files.weights(published)
    (name,) = table
    table[name][SPECIAL] = 1.0
    save_file(table, published / "model.safetensors")
    expected = SentenceTransformer(str(published), device="cpu").encode(TEXTS[:9])
    found = Predictor.open(str(published)).predict(TEXTS[:9])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_width_is_that_of_the_teachers_vectors(teacher, texts, tmp_path):
    """A dense layer turns states of 32 numbers into vectors of 12."""
    dense = dense_layer(torch.eye(32)[:12])
    own_files.embedder(tmp_path / "dense", EmbeddingFormat("mean", layers=(dense,)), base=teacher)
    given = ["distill", tmp_path / "dense", "--data", texts, "--set", "measure.latency=false"]
    assert "choose a width from 1 to 12" in refused(tmp_path, *given, "--to", "static:13")
    result = succeeds(*given, "--to", "static", "--max-steps", "0", "-o", tmp_path / "out")
    assert "principal components" not in said_by(result)
    (student,) = report_of(tmp_path / "out").with_role("student")
    assert student.card.hidden == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "static:0"), "cannot have vectors of 0 numbers"),
        (("--to", "static:33"), "cannot have vectors of 33 numbers"),
        (("--to", "static", "--method", "minilm"), "a static student has no layers"),
        (("--to", "static", "--set", "loss.relations_weight=1"), "compare token states"),
        (("--to", "static", "--student", "demo"), "--student: a static student has"),
        (("--to", "static", "--set", "student.layers=measured"), "student.layers names layers"),
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
