"""`kdcli evaluate --task mteb:NAME`: mteb's measure of kdcli's vectors, and tasks that cannot be
had."""

import shlex
from types import SimpleNamespace

import numpy as np
import own_files
import pytest
import torch
from datasets import Dataset, DatasetDict
from own_files import refused, report_of, succeeds, write
from sentence_transformers.util import SimilarityFunction

from kdcli.models.embedding_format import SIMILARITIES, EmbeddingFormat
from kdcli.workloads.mteb_tasks import Encoder

mteb = pytest.importorskip("mteb")


@pytest.fixture
def models(tmp_path):
    """Two tiny embedding models, one with a prompt for queries."""
    formats = [EmbeddingFormat(prompts=prompts) for prompts in ({"query": "w30 "}, {})]
    return [
        own_files.embedder(tmp_path / f"model-{n}", fmt, num_hidden_layers=1 + n)
        for n, fmt in enumerate(formats)
    ]


def sentence(rng):
    return " ".join(f"w{n}" for n in rng.integers(0, 59, size=6))


def holds(monkeypatch, name, **data):
    """Give a task of mteb rows of our own in place of the hub's."""
    task = mteb.get_task(name)
    task.dataset, task.data_loaded = DatasetDict({"test": Dataset.from_dict(data)}), True
    monkeypatch.setattr(mteb, "get_task", lambda _: task)


def test_its_score_is_that_of_the_same_pairs_here(models, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    first, second = ([sentence(rng) for _ in range(40)] for _ in range(2))
    scores = (np.arange(40) % 6 + 0.5).tolist()
    rows = [{"a": a, "b": b, "label": s} for a, b, s in zip(first, second, scores, strict=True)]
    write(tmp_path / "pairs" / "validation.jsonl", rows)
    columns = ["--set", "data.columns.text=a", "--set", "data.columns.pair=b"]
    succeeds(
        "evaluate",
        *models,
        *shlex.split(f"--task own --data {tmp_path}/pairs"),
        *columns,
        "-o",
        tmp_path / "own",
    )
    holds(monkeypatch, "STS12", sentence1=first, sentence2=second, score=scores)
    succeeds("evaluate", *models, "--task", "mteb:STS12", "-o", tmp_path / "out")
    here, report = report_of(tmp_path / "own"), report_of(tmp_path / "out")
    for ours, theirs in zip(here.evaluations, report.evaluations, strict=True):
        assert theirs.metrics == {
            "cosine_spearman": pytest.approx(ours.metrics["spearman"], abs=1e-5)
        }
        assert (theirs.model, theirs.task, theirs.n) == (ours.model, "mteb:STS12", 80)
    assert report.comparisons == []


@pytest.mark.parametrize("name", SIMILARITIES)
def test_vectors_are_compared_as_the_model_says(name):
    """mteb also compares single vectors when it scores summaries."""
    encoder = Encoder(SimpleNamespace(format=EmbeddingFormat(similarity=name)), None, None)
    x_ND, y_ND = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    theirs = SimilarityFunction.to_similarity_fn(name)
    close = {"atol": 1e-5, "rtol": 1e-5}
    for wrapped in (np.asarray, torch.tensor):
        x, y = wrapped(x_ND), wrapped(y_ND)
        torch.testing.assert_close(encoder.similarity(x, y), theirs(x_ND, y_ND), **close)
        torch.testing.assert_close(
            encoder.similarity_pairwise(x, y), theirs(x_ND, y_ND).diagonal(), **close
        )
        assert float(encoder.similarity(x[0], y[1])) == pytest.approx(
            float(theirs(x_ND[0], y_ND[1])), abs=1e-5
        )


def test_what_cannot_be_had_is_one_message(models, tmp_path):
    given = ["evaluate", models[0], "--task"]
    assert "Did you mean: 'STS12'" in refused(tmp_path, *given, "mteb:STS12x")
    assert "the data of mteb:STS12 (mteb/sts12-sts) is not in the cache" in refused(
        tmp_path, *given, "mteb:STS12"
    )
    assert "choose one of them: CQADupstackAndroidRetrieval" in refused(
        tmp_path, *given, "mteb:CQADupstackRetrieval"
    )
    assert "is a task of image" in refused(tmp_path, *given, "mteb:CIFAR10")
    assert "--mask, --metric" in refused(
        tmp_path, *given, "mteb:STS12", "--predictions", tmp_path / "p"
    )
