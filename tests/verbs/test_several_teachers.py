"""Embedding students of several teachers."""

import numpy as np
import own_files
import pytest
from encoders import foreign_tokenizer
from own_files import refused, report_of, said_by, succeeds

from kdcli.models.embedding_format import EmbeddingFormat
from kdcli.run.context import cpu_session
from kdcli.verbs.distill.space import join_vectors
from kdcli.workloads.embedder import Embedder, cosines

WORDS = [f"w{n}" for n in range(59)]


def embedder(folder, *, foreign=False, similarity="cosine", **sizes):
    """A tiny embedding model of 32 components; a foreign one has another tokenizer."""
    tokenizer = foreign_tokenizer() if foreign else None
    fmt = EmbeddingFormat("mean", normalize=False, similarity=similarity)
    return own_files.embedder(folder / "model", fmt, tokenizer=tokenizer, **sizes)


@pytest.fixture
def texts(tmp_path):
    drawn = np.random.default_rng(0)
    lines = [" ".join(drawn.choice(WORDS, size=drawn.integers(3, 10))) for _ in range(120)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    return tmp_path / "texts.txt"


@pytest.fixture
def given(tmp_path, texts):
    teacher = embedder(tmp_path / "one", num_hidden_layers=4)
    settings = (
        "data.max_length=16 data.held_out_blocks=8 measure.latency=false embedding.anchors=16 "
        "train.eval_every=100"
    )
    options = ["--max-steps", "30", "--batch-size", "16", "--lr", "1e-3", "--dtype", "fp32"]
    keys = [word for key in settings.split() for word in ("--set", key)]
    return ["distill", teacher, "--data", texts, *options, *keys]


def test_the_cosine_of_joined_vectors_is_the_mean_of_the_cosines():
    drawn = np.random.default_rng(0)
    parts = [drawn.normal(size=(6, width)) * drawn.uniform(1, 9, (6, 1)) for width in (5, 8)]
    parts[1][3] = 0
    vectors = join_vectors([lambda at, x=x: x[at] for x in parts])(np.array([4, 0, 3]))
    expected = [
        np.mean([(x[4] @ x[0]) / np.linalg.norm(x[4]) / np.linalg.norm(x[0]) for x in parts])
    ]
    assert vectors.shape == (3, 13)
    assert vectors[0] @ vectors[1] == pytest.approx(expected[0], rel=1e-6)
    assert np.isfinite(vectors).all()
    assert not vectors[2, 5:].any()


def test_a_student_learns_all_teachers(given, tmp_path, texts):
    other = embedder(tmp_path / "two", num_hidden_layers=2)
    result = succeeds(*given, "--also-teacher", other, "--to", "2x32", "-o", tmp_path / "out")
    assert "32 principal components of the teacher's 64-wide vectors" in said_by(result)
    report = report_of(tmp_path / "out")
    assert [one.role for one in report.models][:3] == ["teacher", "teacher", "student"]
    lines = texts.read_text().splitlines()

    def cosines_of(model):
        vectors = Embedder.open(str(model)).vectors(lines, "", cpu_session())
        return cosines(vectors[:-1], vectors[1:])

    wanted = (cosines_of(given[1]) + cosines_of(other)) / 2
    learned = np.corrcoef(cosines_of(tmp_path / "out"), wanted)[0, 1]
    succeeds(*given, "--to", "2x32", "-o", tmp_path / "alone")
    assert learned > np.corrcoef(cosines_of(tmp_path / "alone"), wanted)[0, 1]


def test_the_second_teacher_may_have_other_tokens(given, tmp_path):
    other = embedder(tmp_path / "two", foreign=True)
    succeeds(*given, "--also-teacher", other, "--to", "2x32", "-o", tmp_path / "out")
    own, first = (
        (folder / "tokenizer.json").read_bytes() for folder in (tmp_path / "out", given[1])
    )
    assert own == first


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--also-teacher", "{first}"], "this model is already a teacher"),
        (["--also-teacher", "{dot}"], "are compared by dot"),
        (["--also-teacher", "{second}", "--method", "minilm"], "the states of one teacher"),
        (
            ["--also-teacher", "{second}", "--set", "embedding.vectors={file}"],
            "--also-teacher has no effect",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(given, tmp_path, extra, message):
    names = {
        "first": given[1],
        "second": embedder(tmp_path / "two"),
        "dot": embedder(tmp_path / "dot", similarity="dot"),
        "file": tmp_path / "vectors.npy",
    }
    np.save(names["file"], np.ones((3, 2), np.float32))
    extra = [word.format(**names) for word in extra]
    assert message in refused(tmp_path, *given, *extra, "--to", "2x32")
