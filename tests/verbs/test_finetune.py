"""`kdcli finetune` end to end on tiny models: what a run learns, writes, resumes and repeats."""

import json
import re
import shlex

import numpy as np
import own_files
import pytest
import torch
import transformers
from own_files import (
    NAMES,
    QUICK,
    ROWS,
    interrupted,
    kdcli,
    log_of,
    report_of,
    said_by,
    same_weights,
    succeeds,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from kdcli.types import Schedule

OFTEN = ["--set", "train.eval_every=3", "--set", "train.checkpoint_every=2"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return own_files.encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def given(encoder, tmp_path):
    """A model and a task of two classes, some of its validation labels wrong."""
    data = own_files.own(tmp_path / "tickets", "class")
    own_files.write(
        data / "validation.jsonl", own_files.spoil(own_files.rows("class", 48, seed=1), "class")
    )
    return [
        "finetune",
        encoder,
        "--task",
        "own",
        "--data",
        data,
        *QUICK,
        "--max-steps",
        "12",
        *OFTEN,
    ]


AUTO = {
    "tokens": transformers.AutoModelForTokenClassification,
    "span": transformers.AutoModelForQuestionAnswering,
}
TEXTS = {"pair": ("premise", "hypothesis"), "tokens": ("tokens",), "span": ("question", "context")}


def logits_of(folder, kind, rows):
    """The saved model's logits for every row, by transformers alone and without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AUTO.get(kind, AutoModelForSequenceClassification).from_pretrained(folder)
    how = {"is_split_into_words": kind == "tokens", "return_token_type_ids": True}
    for row in rows:
        texts = (row[c] for c in TEXTS.get(kind, ("text",)))
        with torch.no_grad():
            out = model(**tokenizer(*texts, return_tensors="pt", **how))
        span = kind == "span"
        yield (
            torch.stack([out.start_logits[0], out.end_logits[0]], -1) if span else out.logits[0]
        ).numpy()


def names_of(folder):
    return {
        int(k): v for k, v in json.loads((folder / "config.json").read_text())["id2label"].items()
    }


def class_scores(folder, kind, rows):
    predicted = [names_of(folder)[logits.argmax()] for logits in logits_of(folder, kind, rows)]
    return {
        "accuracy": np.mean([p == row["label"] for p, row in zip(predicted, rows, strict=True)])
    }


def multi_scores(folder, kind, rows):
    predicted = [
        {names_of(folder)[i] for i in np.flatnonzero(o > 0)} for o in logits_of(folder, kind, rows)
    ]
    pairs = list(zip(predicted, (set(row["label"]) for row in rows), strict=True))
    both, either = (sum(len(f(p, t)) for p, t in pairs) for f in (set.__and__, set.__xor__))
    return {
        "exact": np.mean([p == t for p, t in pairs]),
        "micro_f1": 2 * both / (2 * both + either),
    }


def score_scores(folder, kind, rows):
    predicted, truth = [o[0] for o in logits_of(folder, kind, rows)], [row["label"] for row in rows]
    return {
        "pearson": np.corrcoef(predicted, truth)[0, 1],
        "mse": np.mean(np.square(np.subtract(predicted, truth))),
    }


def tokens_scores(folder, kind, rows):
    # Every entity is one word.
    predicted = [names_of(folder)[i] for o in logits_of(folder, kind, rows) for i in o.argmax(-1)]
    truth = [tag for row in rows for tag in row["ner_tags"]]
    pairs = list(zip(predicted, truth, strict=True))
    right = pairs.count(("B-LOC", "B-LOC"))
    recall, precision = right / truth.count("B-LOC"), right / predicted.count("B-LOC")
    f1 = 2 * precision * recall / (precision + recall)
    return {
        "accuracy": np.mean([p == t for p, t in pairs]),
        "f1": f1,
        "recall": recall,
        "precision": precision,
    }


def span_scores(folder, kind, rows):
    exact = []
    for row, logits in zip(rows, logits_of(folder, kind, rows), strict=True):
        words = row["context"].split()
        begin, end = logits[len(row["question"].split()) :].T
        sums = np.triu(begin[:, None] + end[None, :]) + np.tril(
            np.full((len(words), len(words)), -1e9), -1
        )
        first, last = np.unravel_index(sums.argmax(), sums.shape)
        exact.append(" ".join(words[first : last + 1]) == row["answers"]["text"][0])
    return {"exact": np.mean(exact)}


# Kind -> an independent computation, the main metric, its least value (far above chance), and the
# labels.
EXPECTED = {
    "class": (class_scores, "accuracy", 0.7, sorted(NAMES)),
    "pair": (class_scores, "accuracy", 0.7, ["other", "same"]),
    "multi": (multi_scores, "micro_f1", 0.7, sorted(NAMES)),
    "score": (score_scores, "pearson", 0.5, ["score"]),
    "tokens": (tokens_scores, "f1", 0.8, ["O", "B-LOC"]),
    "span": (span_scores, "exact", 0.7, None),
}


@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_of_own_task_is_learned_saved_and_evaluated(encoder, tmp_path, kind):
    data, out = own_files.own(tmp_path / "data", kind), tmp_path / "out"
    rows = own_files.spoil(own_files.rows(kind, 48, seed=1), kind)
    own_files.write(data / "validation.jsonl", rows)
    succeeds("finetune", encoder, "--task", "own", "--data", data, *QUICK, "-o", out)
    assert {p.name for p in out.iterdir()} == own_files.REPORT | own_files.TUNED
    compute, metric, least, labels = EXPECTED[kind]
    config = json.loads((out / "config.json").read_text())
    assert config["kdcli_task"] == "own"
    assert labels is None or list(config["id2label"].values()) == labels
    report, last = report_of(out), log_of(out)[-1]
    (evaluation,) = report.evaluations
    assert (evaluation.n, evaluation.split, evaluation.set) == (48, "validation", "")
    expected = compute(out, kind, rows)
    assert {name: evaluation.metrics[name] for name in expected} == pytest.approx(
        expected, abs=1e-5
    )
    assert least < evaluation.metrics[metric] < 1
    assert report.quality["own"]["finetuned"] == evaluation.metrics
    assert evaluation.worst
    assert last["step"] == 40
    # Evaluated in other micro-batches than after training, so equal up to rounding.
    assert last["metrics"] == pytest.approx(evaluation.metrics, abs=1e-6)
    assert last["held_out"]["loss"] < log_of(out)[0]["held_out"]["loss"]


def test_windows_of_a_question_have_a_default_length(tmp_path):
    encoder = own_files.encoder(tmp_path / "encoder", max_position_embeddings=512)
    lines = own_files.rows("span", 16)
    lines[0]["context"] += " w3" * 400
    own_files.write(tmp_path / "train.jsonl", lines)
    options = [
        *shlex.split("--max-steps 1 --batch-size 8 --set measure.latency=false"),
        "-o",
        tmp_path / "out",
    ]
    succeeds("finetune", encoder, "--task", "own", "--data", tmp_path / "train.jsonl", *options)
    assert any(
        "more than one window of 384 tokens" in note for note in report_of(tmp_path / "out").notes
    )


def test_what_a_run_prints_and_when_it_evaluates(given, tmp_path):
    out = tmp_path / "out"
    result = succeeds(*given, "-o", out)
    assert "tickets accuracy" in result.stdout
    assert f"model and report in {out}" in result.stdout.replace("\n", "")
    for name in ("report.md", "report.html", "README.md"):
        assert "accuracy" in (out / name).read_text("utf-8")
    assert [r["step"] for r in log_of(out) if "metrics" in r] == [0, 3, 6, 9, 12]
    assert "--overwrite" in said_by(kdcli(*given, "-o", out))
    succeeds(*given, "-o", out, "--overwrite", "--max-steps", "6")
    assert report_of(out).training.steps == 6


@pytest.mark.parametrize(("lr", "steps", "learns"), [("1e-9", 12, False), ("3e-3", 40, True)])
def test_a_run_shows_the_trivial_answer_and_warns_if_it_learned_nothing(
    lr, steps, learns, given, tmp_path
):
    done = succeeds(*given, "--lr", lr, "--max-steps", steps, "-o", tmp_path / "out")
    score, *warnings = [
        note for note in report_of(tmp_path / "out").notes if note.startswith("the fine-tuned ")
    ]
    assert re.fullmatch(
        r"the fine-tuned model has accuracy \d\.\d+ on 48 held-out rows; "
        r"answering (brisk|calm) to every text has \d\.\d+",
        score,
    )
    assert len(warnings) == (not learns)
    said = "may have learned little or nothing: its score is not clearly better than always"
    assert all(said in warning and "--lr 1e-3" in warning for warning in warnings)
    assert all(note in " ".join(done.stdout.split()) for note in [score, *warnings])


def test_the_same_seed_gives_the_same_bits_and_another_one_others(given, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        succeeds(*given, "--seed", seed, "-o", tmp_path / name)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_a_dry_run_estimates_every_setting_and_leaves_nothing(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    grid = ["--grid", "lr=1e-3,3e-3", "--seeds", "2", "--max-steps", "500"]
    for where in (["-o", tmp_path / "out"], []):
        estimate = json.loads(succeeds(*given, *grid, *where, "--dry-run", "--json").stdout)
        assert [leg["steps"] for leg in estimate["legs"]] == [500, 500]
        assert all(leg["folder"].endswith(",seed=0 and 1 more seeds") for leg in estimate["legs"])
        assert all(leg["seconds"] >= 2 * 500 * leg["seconds_per_step"] for leg in estimate["legs"])
        assert estimate["models"]["finetuned"]["params_total"] > 0
    assert sorted(tmp_path.rglob("*")) == before


def test_the_best_weights_are_kept_and_not_the_last(given, tmp_path, monkeypatch):
    """The last steps go uphill, so that what was learned is lost again."""
    monkeypatch.setattr(Schedule, "lr_at", lambda self, step: 3e-3 if step <= 9 else -3e-2)
    long, best_of, cut = (
        [*given, "--max-steps", "15", "--set", "keep=best"],
        tmp_path / "best",
        tmp_path / "cut",
    )
    succeeds(*long, "-o", best_of)
    scores = {
        r["step"]: r["metrics"]["accuracy"]
        for r in log_of(best_of)
        if "metrics" in r and r["step"] > 0
    }
    best = max(scores, key=scores.get)
    assert scores[best] > scores[15]
    report = report_of(best_of)
    assert report.evaluations[0].metrics["accuracy"] == scores[best]
    assert any(
        f"the weights of step {best} were kept, chosen by accuracy on validation" in n
        for n in report.notes
    )
    # A run cut after its best step recovers them.
    assert interrupted(monkeypatch, "cut", 12, *long, "-o", cut).exit_code == 130
    succeeds(*long, "-o", cut, "--resume")
    # They are the last weights of a run of that many steps.
    monkeypatch.setattr(Schedule, "lr_at", lambda self, step: 3e-3)
    succeeds(*given, "--max-steps", best, "-o", tmp_path / "short")
    assert same_weights(best_of, cut)
    assert same_weights(best_of, tmp_path / "short")
    assert not (best_of / "checkpoints").exists()


def test_tensorboard_gets_what_the_log_holds(given, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "out"
    succeeds(*given, "-o", out, "--report-to", "tensorboard")
    found = reader.EventAccumulator(str(out / "logs" / "kdcli")).Reload()
    logged = own_files.lines_of(out / "log.jsonl")
    assert found.Tags()["scalars"]
    for tag, values in (
        ("loss", lambda row: row),
        ("metrics/accuracy", lambda row: row.get("metrics", {})),
    ):
        expected = [
            (row["step"], values(row)[tag.rpartition("/")[2]])
            for row in logged
            if tag[-8:] in values(row)
        ]
        assert [(e.step, e.value) for e in found.Scalars(tag)] == [
            (s, pytest.approx(v, rel=1e-6)) for s, v in expected
        ]
        assert expected
