"""The agreement of embedding models with a teacher: its texts, definition and bootstrap."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from kdcli.errors import UsageError
from kdcli.workloads.agreement import agreement_scorer
from kdcli.workloads.embedding_texts import evaluated_texts
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.settings import LabelledSettings


def drawn(generator, count):
    """A student's and a teacher's vectors; the student is right about some texts only."""
    teacher_ND = generator.standard_normal((count, 16)) + 1.0
    noise_N1 = generator.gamma(1.0, 0.6, size=(count, 1))
    return teacher_ND + noise_N1 * generator.standard_normal((count, 16)), teacher_ND


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_all_texts_are_scored_by_definition():
    count = 30
    own, teacher = drawn(np.random.default_rng(0), count)
    found = agreement_scorer(own, teacher, 3)(np.arange(count))
    pairs = [(i, j) for i in range(count) for j in range(i)]
    by_model = [[cosine(x[i], x[j]) for i, j in pairs] for x in (own, teacher)]
    # The drawn pairs are nearly all pairs, each many times.
    assert found["spearman"] == pytest.approx(spearmanr(*by_model).statistic, abs=0.02)
    shared = []
    for i in range(count):
        nearest = [
            sorted((j for j in range(count) if j != i), key=lambda j: -cosine(x[i], x[j]))[:10]
            for x in (own, teacher)
        ]
        shared.append(len(set(nearest[0]) & set(nearest[1])) / 10)
    assert found["neighbours@10"] == pytest.approx(np.mean(shared))
    perfect = agreement_scorer(teacher, 2 * teacher, 3)(np.arange(count))
    assert perfect == pytest.approx({"spearman": 1.0, "neighbours@10": 1.0})


@pytest.mark.parametrize("rows", [[2, 2, 2, 2], [1, 3, 3, 1]])
def test_a_draw_of_one_or_two_texts_has_no_correlation(rows):
    own, teacher = drawn(np.random.default_rng(0), 4)
    assert agreement_scorer(own, teacher, 0)(np.array(rows))["spearman"] == 0.0


@pytest.mark.parametrize(
    ("files", "asked", "split", "first"),
    [
        (("train", "validation"), "validation", "validation", "Validation"),
        (("train", "validation", "test"), "test", "test", "Test"),
        (("train",), "validation", "all texts", "Train"),
    ],
)
def test_texts_of_the_split_are_compared(tmp_path, files, asked, split, first):
    for name in files:
        lines = [f"{name.title()} text number {n} of its file.\n" for n in range(20)]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    data = LabelledSettings(source=str(tmp_path), split=asked)
    texts, named = evaluated_texts(EvaluationRequest("embedding", [], data, divided=True))
    assert named == split
    assert {text.split()[0] for text in texts.texts} == {first}


def test_a_missing_split_of_texts_is_refused(tmp_path):
    (tmp_path / "train.txt").write_text("One text of four words.\nAnother text of some words.\n")
    data = LabelledSettings(source=str(tmp_path), split="test")
    with pytest.raises(UsageError, match="has no test split; it has train"):
        evaluated_texts(EvaluationRequest("embedding", [], data, divided=True))


def test_only_an_evaluation_reads_a_small_validation_split(tmp_path):
    lines = [f"Train text number {n} of its file.\n" for n in range(20)]
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / "validation.txt").write_text("One text of four words.\n")
    data = LabelledSettings(source=str(tmp_path))
    texts, _ = evaluated_texts(EvaluationRequest("embedding", [], data))
    assert len(texts) == 20
    with pytest.raises(UsageError, match=r"the validation split of .* holds only one text"):
        evaluated_texts(EvaluationRequest("embedding", [], data, divided=True))
