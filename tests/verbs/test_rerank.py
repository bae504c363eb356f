"""`kdcli distill --task rerank` and `kdcli finetune --task rerank`, from end to end on tiny
models."""

import shlex

import numpy as np
import own_files
import pytest
import torch
from encoders import foreign_tokenizer, on_disk, tiny_encoder
from own_files import (
    kdcli,
    log_of,
    refused,
    report_of,
    said_by,
    succeeds,
    write,
)
from sentence_transformers import CrossEncoder
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForSequenceClassification, BertModel

from kdcli.models.embedding_format import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder

QUICK = shlex.split(
    "--max-steps 8 --batch-size 6 --lr 1e-3 --dtype fp32 --set data.max_length=24 "
    "--set train.eval_every=4 --set train.log_every=1 --set train.checkpoint_every=3 "
    "--set measure.latency=false"
)


def listed(n, seed=0):
    """Queries of two words; passages that hold both, one or none of them."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n):
        a, b, c, d, e = rng.choice(59, size=5, replace=False)
        negatives = [f"w{a} w{c} w{d}", f"w{c} w{d} w{e}"][: rng.integers(1, 3)]
        rows.append({"query": f"w{a} w{b}", "positive": f"w{c} w{a} w{b}", "negative": negatives})
    return rows


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "data" / "train.jsonl", listed(40))
    write(tmp_path / "data" / "validation.jsonl", listed(20, seed=1))
    return tmp_path / "data"


@pytest.fixture
def teacher(tmp_path):
    """A tiny cross-encoder as sentence-transformers 6.2 saves it, with an activation of its own."""
    own_files.headed(tmp_path / "raw", num_labels=1, num_hidden_layers=4, type_vocab_size=2)
    model = CrossEncoder(str(tmp_path / "raw"), device="cpu", activation_fn=torch.nn.Identity())
    model.save_pretrained(str(tmp_path / "teacher"))
    return tmp_path / "teacher"


@pytest.fixture
def given(teacher, data):
    return ["distill", teacher, "--task", "rerank", "--data", data, *QUICK]


def test_a_cross_encoder_becomes_a_smaller_one(given, tmp_path):
    out = tmp_path / "out"
    # 20 lists do not generalise, so the loss of the training must fall.
    steps = ("--max-steps", "40")
    succeeds(*given, "--to", "2x32", *steps, "-o", out)
    losses = [record["loss"] for record in log_of(out) if "loss" in record]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    last = log_of(out)[-1]
    report = report_of(out)
    assert [e.model for e in report.evaluations] == ["teacher", "student", "student undistilled"]
    assert all(set(e.metrics) == {"ndcg@10", "mrr@10"} and e.n == 20 for e in report.evaluations)
    assert {(c.model, c.baseline) for c in report.comparisons} == {
        ("student", "teacher"),
        ("student undistilled", "teacher"),
    }
    student = CrossEncoder(str(out), device="cpu")
    assert (student.num_labels, type(student.activation_fn)) == (1, torch.nn.Identity)
    # The student that others load scores as the one that was judged.
    ours = next(e.metrics for e in report.evaluations if e.model == "student")
    assert last["metrics"] == pytest.approx(ours)
    assert mrr(student) == pytest.approx(ours["mrr@10"])


def mrr(model):
    found = []
    for row in listed(20, seed=1):
        passages = [row["positive"], *row["negative"]]
        scores = model.predict([(row["query"], p) for p in passages])
        found.append(1 / (1 + int((scores[1:] >= scores[0]).sum())))
    return np.mean(found)


def test_an_untrained_reranker_is_no_better_than_a_random_order(teacher, data, tmp_path):
    given = ["--task", "rerank", "--data", data, *QUICK, "--lr", "1e-9", "-o", tmp_path / "out"]
    succeeds("finetune", teacher, *given)
    sizes = np.array([1 + len(row["negative"]) for row in listed(20, seed=1)])
    expected = np.mean([np.mean(1 / np.arange(1, size + 1)) for size in sizes])
    (evaluation,) = report_of(tmp_path / "out").evaluations
    assert evaluation.trivial.metrics["mrr@10"] == pytest.approx(expected)
    notes = " ".join(report_of(tmp_path / "out").notes)
    assert "; a random order of the passages has 0." in notes
    assert "its score is not clearly better than a random order" in notes


def test_rerankers_are_judged_beside_each_other(given, data, tmp_path):
    """An embedding model ranks by cosines."""
    base = load_encoder(str(own_files.encoder(tmp_path / "base")))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat("mean"), tmp_path / "embedder")
    models = [given[1], tmp_path / "embedder"]
    succeeds("evaluate", *models, "--task", "rerank", "--data", data, "-o", tmp_path / "judged")
    teacher, embedder = report_of(tmp_path / "judged").evaluations
    # Bags of words tell these passages apart.
    assert embedder.metrics["mrr@10"] > teacher.metrics["mrr@10"]


def test_queries_that_trained_a_reranker_do_not_judge_it(given, data, tmp_path):
    succeeds(*given, "--to", "2x16", "-o", tmp_path / "out")
    write(tmp_path / "more" / "train.jsonl", listed(2, seed=2))
    write(tmp_path / "more" / "validation.jsonl", [*listed(40)[:5], *listed(20, seed=1)])
    judging = [
        "evaluate",
        given[1],
        tmp_path / "out",
        "--task",
        "rerank",
        "--data",
        tmp_path / "more",
    ]
    result = succeeds(*judging, "-o", tmp_path / "judged")
    assert "dropped 5 of 25 queries that were used to train one of the models" in said_by(result)
    assert {e.n for e in report_of(tmp_path / "judged").evaluations} == {20}
    succeeds(*judging, "--set", "data.judge_trained_rows=true", "-o", tmp_path / "all")
    assert {(e.n, e.split) for e in report_of(tmp_path / "all").evaluations} == {
        (25, "validation, 5 of 25 trained a model")
    }
    alone = write(tmp_path / "alone.jsonl", [*listed(40)[:5], *listed(20, seed=1)])
    one_file = [*judging[:-1], alone]
    succeeds(*one_file, "-o", tmp_path / "one-file")
    report = report_of(tmp_path / "one-file")
    assert {(e.n, e.split) for e in report.evaluations} == {(20, "held-out rows")}
    assert any(note.startswith("dropped 5 of 25 queries") for note in report.notes)
    write(tmp_path / "more" / "validation.jsonl", listed(40)[:5])
    assert "all 5 queries of the validation split were used to train one of the models" in refused(
        tmp_path, *judging
    )


def test_one_file_is_evaluated_whole(teacher, tmp_path):
    write(tmp_path / "few.jsonl", listed(5))
    judging = ("evaluate", teacher, "--task", "rerank", "--data", tmp_path / "few.jsonl")
    succeeds(*judging, "-o", tmp_path / "judged")
    assert {(e.n, e.split) for e in report_of(tmp_path / "judged").evaluations} == {(5, "train")}


def test_a_reranker_is_distilled_as_one_without_being_told(given, tmp_path):
    arguments = [part for part in given if part not in ("--task", "rerank")]
    result = succeeds(*arguments, "--to", "2x16", "-o", tmp_path / "out")
    assert "is distilled on task rerank; --method distils its encoder" in said_by(result)
    assert report_of(tmp_path / "out").recipe["task"] == "rerank"
    assert (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.hidden_size
        == 16
    )


def test_a_student_of_other_tokens(given, tmp_path):
    narrow = tiny_encoder("distilbert", dim=16, n_heads=2, hidden_dim=32, initializer_range=0.1)
    other = on_disk(narrow, tmp_path / "other", foreign_tokenizer())
    succeeds(
        *given, "--max-steps", "40", "--lr", "5e-3", "--student", other, "-o", tmp_path / "out"
    )
    student = CrossEncoder(str(tmp_path / "out"), device="cpu")
    assert student.tokenizer.get_vocab() == foreign_tokenizer().get_vocab()
    assert isinstance(student.activation_fn, torch.nn.Identity), "the teacher's"
    losses = [row["terms"]["scores"] for row in log_of(tmp_path / "out") if row["step"]]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_an_embedding_model_teaches_by_cosines(data, tmp_path):
    base = load_encoder(str(own_files.encoder(tmp_path / "base", num_hidden_layers=4)))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat("mean"), tmp_path / "embedder")
    given = [
        "distill",
        tmp_path / "embedder",
        *shlex.split("--task rerank --to 2x32"),
        "--data",
        data,
        *QUICK,
    ]
    assert "it has no head with one output" in refused(tmp_path, *given, "--max-steps", "0")
    result = succeeds(*given, "-o", tmp_path / "out")
    assert "cosines of its vectors; mean pooling" in said_by(result)
    student = CrossEncoder(str(tmp_path / "out"), device="cpu")
    assert (student.num_labels, type(student.activation_fn)) == (1, torch.nn.Identity)


def test_scores_come_from_the_data(data, teacher, tmp_path):
    """The teacher's scores written next to the passages teach as the teacher itself."""
    model = CrossEncoder(str(teacher), device="cpu")
    rows = []
    for row in listed(40):
        passages = [row["positive"], *row["negative"]]
        scores = model.predict([(row["query"], p) for p in passages]).tolist()
        labels = [1, *[0] * len(row["negative"])]
        rows.append(
            {"query": row["query"], "passages": passages, "labels": labels, "scores": scores}
        )
    write(data / "train.jsonl", rows)
    start = own_files.encoder(tmp_path / "start", type_vocab_size=2)
    alike = ["--task", "rerank", "--student", start, "--data", data, *QUICK]
    succeeds("distill", teacher, *alike, "-o", tmp_path / "taught")
    succeeds("distill", *alike, "-o", tmp_path / "read")
    steps = [
        [r["terms"] for r in log_of(tmp_path / name) if r["step"]] for name in ("taught", "read")
    ]
    for taught, read in zip(*steps, strict=True):
        assert read == {name: pytest.approx(value, rel=1e-3) for name, value in taught.items()}
    assert [e.model for e in report_of(tmp_path / "read").evaluations] == [
        "student",
        "student undistilled",
    ]


@pytest.mark.parametrize("evaluated", ["labels", "scores"])
def test_a_ranking_is_fine_tuned_on_scores_and_scored_on_labels(data, tmp_path, evaluated):
    values = {"labels": [1, 0, 0], "scores": [2.0, 0.5, -1.0]}

    def rows(count, key):
        lists = [(r["query"], [r["positive"], *r["negative"]]) for r in listed(count)]
        return [{"query": q, "passages": p, key: values[key][: len(p)]} for q, p in lists]

    write(data / "train.jsonl", rows(40, "scores"))
    write(data / "validation.jsonl", rows(10, evaluated))
    encoder = own_files.encoder(tmp_path / "start", type_vocab_size=2)
    given = ["finetune", encoder, "--task", "rerank", "--data", data, *QUICK]
    if evaluated == "scores":
        assert "have no labels, which score the model" in refused(tmp_path, *given)
        return
    succeeds(*given, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert "trained on scores in the data" in report.notes
    assert any("have no score, so the held-out loss is always 0" in note for note in report.notes)
    assert {(e.reference, e.n) for e in report.evaluations} == {("labels", 10)}


@pytest.mark.parametrize("verb", ["distill", "prune"])
def test_labels_of_the_validation_split_alone_score_the_models(teacher, data, tmp_path, verb):
    rows = [
        {"query": row["query"], "passages": [row["positive"], *row["negative"]]}
        for row in listed(40)
    ]
    write(data / "train.jsonl", rows)
    more = ["--to", "2x16"] if verb == "distill" else ["--sparsity", "0.5"]
    given = [verb, teacher, "--task", "rerank", "--data", data, *QUICK]
    succeeds(*given, *more, "-o", tmp_path / "out")
    evaluations = report_of(tmp_path / "out").evaluations
    assert {(e.reference, e.n, *e.metrics) for e in evaluations} == {
        ("labels", 20, "ndcg@10", "mrr@10")
    }
    model = CrossEncoder(str(teacher), device="cpu")
    assert evaluations[0].metrics["mrr@10"] == pytest.approx(mrr(model))


def test_a_held_out_pass_counts_candidates_and_not_lists(data, tmp_path):
    taken = []

    def record(module, inputs, output):
        if isinstance(module, BertModel) and not module.training:
            taken.append(len(output.last_hidden_state))

    # Eight candidates in place of three; training takes 32 // 2.5 lists, and no more than a batch.
    rows = [row | {"negative": [f"w{n}" for n in range(7)]} for row in listed(20, seed=1)]
    write(data / "validation.jsonl", rows)
    base = own_files.encoder(tmp_path / "base", type_vocab_size=2)
    hook = register_module_forward_hook(record)
    succeeds("finetune", base, "--task", "rerank", "--data", data, *QUICK, "-o", tmp_path / "out")
    hook.remove()
    assert max(taken) == 8


def test_whole_queries_are_held_back_of_pairs(tmp_path):
    rows = [
        {"question": row["query"], "sentence": passage, "label": label}
        for row in listed(200)
        for passage, label in [(row["positive"], 1), *((p, 0) for p in row["negative"])]
    ]
    # As mined negatives are: the higher label counts.
    file = write(tmp_path / "pairs.jsonl", [*rows, rows[0] | {"label": 0}])
    base = own_files.encoder(tmp_path / "base", type_vocab_size=2)
    result = succeeds(
        "finetune", base, "--task", "rerank", "--data", file, *QUICK, "-o", tmp_path / "out"
    )
    assert "queries are held out for evaluation" in said_by(result)
    assert "1 pairs of query and passage have several labels" in said_by(result)
    (first, *_) = report_of(tmp_path / "out").evaluations
    assert first.split == "held-out rows"
    assert 5 < first.n < 40


PAIR = {"query": "w1", "passage": "w2", "label": 1}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "w1", "positive": "w1"}], "train.jsonl:1: the query has no negative"),
        (
            [{"query": "w1", "positive": " ", "negative": "w2"}],
            "train.jsonl:1: 'positive' must be a text, got ' '",
        ),
        (
            [{"query": "w1", "text": "w2"}],
            "train.jsonl:1: no column passage or sentence or document; the columns are query",
        ),
        ([PAIR | {"label": -1}], "a label is a relevance, 0 or more, got -1.0"),
        (
            [PAIR | {"score": 1}, PAIR | {"score": 2}],
            "the passage 'w2' of 'w1' has a different score in an earlier row",
        ),
        (
            [{"query": "w1", "passages": ["w2"], "scores": [1, 2]}],
            "'scores' must hold a finite number for each of 1",
        ),
        (
            [{"query": "w1", "passage": "w2", "score": float("nan")}],
            "'score' must hold a finite number",
        ),
        ([], "train.jsonl holds no rows"),
    ],
)
def test_lists_that_cannot_be_used(teacher, data, tmp_path, rows, message):
    write(data / "train.jsonl", rows)
    given = ["distill", teacher, "--task", "rerank", "--data", data, "--to", "2x16", *QUICK]
    assert message in refused(tmp_path, *given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--to", "2x16", "--method", "minilm"],
            "task rerank does not read method: its student learns the outputs of one teacher",
        ),
        (
            ["--to", "2x16", "--to", "3x16"],
            "on a task, one student is distilled at a time, but 2 shapes were given",
        ),
        ([], "no student given"),
        (
            ["--to", "2x16", "--soft-labels", "x.npy"],
            "task rerank does not read soft_labels",
        ),
        (["--to", "2x16", "--set", "ranking.loss=hinge"], "'workload.loss'"),
        (["--to", "2x16", "--set", "kd.weight=1"], "the keys of kd: do not apply to task rerank"),
        (["--to", "2x16", "--set", "choose_on=x"], "task rerank does not read choose_on"),
        (["--to", "2x16", "--data", "demo"], "the demo has no lists of candidates"),
    ],
)
def test_what_cannot_be_is_refused(given, tmp_path, more, message):
    assert message in refused(tmp_path, *given, *more)


def test_models_of_another_kind_are_refused(given, teacher, data, tmp_path):
    three = own_files.headed(tmp_path / "three", ("a", "b", "c"))
    message = refused(
        tmp_path, *[three if part == teacher else part for part in given], "--to", "2x16"
    )
    assert "has no vectors" in message
    keys = ["--set", "data.skip_bad=true", "--set", "data.columns.label=score"]
    message = refused(tmp_path, "evaluate", teacher, "--task", "rerank", "--data", data, *keys)
    assert "data.columns, data.skip_bad: lists of candidates have no such choice" in message
    (tmp_path / "texts.txt").write_text("w1 w2.\nw3 w4.\n")
    texts = ["--data", tmp_path / "texts.txt", "--method", "embedding", "--to", "2x16"]
    assert "scores texts (BertForSequenceClassification)" in refused(
        tmp_path, "distill", teacher, *texts
    )
    given = ["distill", "--task", "rerank", "--data", data, *QUICK, "--student", three]
    assert "training passages have no score" in refused(tmp_path, *given)
    assert kdcli("finetune", three, "--task", "rerank").exit_code == 2
