"""A student for queries and its teacher for documents, as one model."""

import numpy as np
import own_files
import pytest
import torch
from own_files import refused, succeeds
from sentence_transformers import SentenceTransformer

from kdcli.models.embedding_format import EmbeddingFormat, dense_layer

TEXTS = ["w1 w2", "w3 w4 w5"]


@pytest.fixture
def given(tmp_path):
    fmt = EmbeddingFormat("cls", prompts={"query": "w30 "}, max_length=20)
    teacher = own_files.embedder(tmp_path / "teacher", fmt, num_hidden_layers=4)
    drawn = np.random.default_rng(0)
    lines = [" ".join(f"w{n}" for n in drawn.integers(0, 59, size=6)) for _ in range(80)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    settings = "data.held_out_blocks=8 measure.latency=false embedding.router=true"
    keys = [word for key in settings.split() for word in ("--set", key)]
    data = ["--data", tmp_path / "texts.txt", "--max-steps", "3", "--dtype", "fp32"]
    return ["distill", teacher, *data, *keys]


@pytest.mark.parametrize("shape", [["2x32"], ["static"]])
def test_queries_are_encoded_by_the_student_and_documents_by_the_teacher(given, tmp_path, shape):
    succeeds(*given, "--to", *shape, "-o", tmp_path / "out")
    both, student, teacher = (
        SentenceTransformer(str(folder), device="cpu")
        for folder in (tmp_path / "out" / "router", tmp_path / "out", given[1])
    )
    assert both.encode_query(TEXTS) == pytest.approx(student.encode_query(TEXTS), abs=1e-6)
    assert both.encode_document(TEXTS) == pytest.approx(teacher.encode_document(TEXTS), abs=1e-6)
    assert both.similarity_fn_name == teacher.similarity_fn_name


def test_a_student_keeps_its_teachers_dense_layer(given, tmp_path):
    fmt = EmbeddingFormat("mean", layers=(dense_layer(torch.eye(32)[:8]),))
    given[1] = own_files.embedder(tmp_path / "dense", fmt, base=tmp_path / "base")
    succeeds(*given, "--to", "2x32", "-o", tmp_path / "out")
    both = SentenceTransformer(str(tmp_path / "out" / "router"), device="cpu")
    assert both.encode_query(TEXTS).shape == both.encode_document(TEXTS).shape == (2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "2x16"], "principal components"),
        (["--to", "static:16"], "principal components"),
        (["--to", "2x32", "--set", "loss.dimensions=[32,16]"], "principal components"),
        (["--to", "2x32", "--also-teacher", "{other}"], "of the teacher alone"),
    ],
)
def test_a_student_in_another_space_is_refused(given, tmp_path, options, message):
    other = own_files.embedder(tmp_path / "other")
    options = [word.format(other=other) for word in options]
    assert message in refused(tmp_path, *given, *options)
