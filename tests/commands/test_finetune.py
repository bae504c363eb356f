"""`kdcli finetune` from end to end on tiny models: what a run learns, leaves, repeats and refuses."""

from __future__ import annotations

import json
import shutil

import numpy as np
import own_files
import processes
import pytest
import torch
from own_files import NAMES, QUICK, ROWS, kdcli, log_of, report_of, said_by
from safetensors.torch import load_file
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

OFTEN = ["--set", "train.eval_every=3", "--set", "train.checkpoint_every=2"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return own_files.encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def given(encoder, tmp_path):
    """A model and a plain task of two classes, some of the judged ones labelled wrong."""
    data = own_files.own(tmp_path / "data", "class")
    own_files.write(data / "validation.jsonl", own_files.spoil(own_files.rows("class", 48, seed=1), "class"))
    return ["finetune", encoder, "--task", "own", "--data", data, *QUICK, "--max-steps", "12", *OFTEN]


AUTO = {"tokens": AutoModelForTokenClassification, "span": AutoModelForQuestionAnswering}


def logits_of(folder, kind, row):
    """What the saved model says of one row, by transformers alone and without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AUTO.get(kind, AutoModelForSequenceClassification).from_pretrained(folder)
    texts = {"pair": ("premise", "hypothesis"), "tokens": ("tokens",), "span": ("question", "context")}
    batch = tokenizer(
        *(row[c] for c in texts.get(kind, ("text",))),
        is_split_into_words=kind == "tokens",
        return_tensors="pt",
        return_token_type_ids=True,
    )
    with torch.no_grad():
        out = model(**batch)
    if kind == "span":
        return torch.stack([out.start_logits[0], out.end_logits[0]], -1).numpy()
    return out.logits[0].numpy()


def class_scores(folder, kind, judged):
    names = json.loads((folder / "config.json").read_text())["id2label"]
    said = [names[str(logits_of(folder, kind, row).argmax())] for row in judged]
    return {"accuracy": np.mean([s == row["label"] for s, row in zip(said, judged, strict=True)])}


def multi_scores(folder, kind, judged):
    names = json.loads((folder / "config.json").read_text())["id2label"]
    said = [{names[str(i)] for i in np.flatnonzero(logits_of(folder, kind, row) > 0)} for row in judged]
    truth = [set(row["label"]) for row in judged]
    both, either = (sum(len(f(s, t)) for s, t in zip(said, truth, strict=True)) for f in (set.__and__, set.__xor__))
    return {
        "exact": np.mean([s == t for s, t in zip(said, truth, strict=True)]),
        "micro_f1": 2 * both / (2 * both + either),
    }


def score_scores(folder, kind, judged):
    said, truth = [logits_of(folder, kind, row)[0] for row in judged], [row["label"] for row in judged]
    return {"pearson": np.corrcoef(said, truth)[0, 1], "mse": np.mean(np.square(np.subtract(said, truth)))}


def tokens_scores(folder, kind, judged):
    # Every entity is one word.
    names = json.loads((folder / "config.json").read_text())["id2label"]
    said = [names[str(i)] for row in judged for i in logits_of(folder, kind, row).argmax(-1)]
    truth = [tag for row in judged for tag in row["ner_tags"]]
    pairs = list(zip(said, truth, strict=True))
    right = pairs.count(("B-LOC", "B-LOC"))
    recall, precision = right / truth.count("B-LOC"), right / said.count("B-LOC")
    f1 = 2 * precision * recall / (precision + recall)
    return {"accuracy": np.mean([s == t for s, t in pairs]), "f1": f1, "recall": recall, "precision": precision}


def span_scores(folder, kind, judged):
    exact = []
    for row in judged:
        question, words = len(row["question"].split()), row["context"].split()
        begin, end = logits_of(folder, kind, row)[question:].T
        sums = np.triu(begin[:, None] + end[None, :]) + np.tril(np.full((len(words), len(words)), -1e9), -1)
        first, last = np.unravel_index(sums.argmax(), sums.shape)
        exact.append(" ".join(words[first : last + 1]) == row["answers"]["text"][0])
    return {"exact": np.mean(exact)}


# Kind → an independent computation, the metric that counts, and what to be above: chance is far below.
EXPECTED = {
    "class": (class_scores, "accuracy", 0.7),
    "pair": (class_scores, "accuracy", 0.7),
    "multi": (multi_scores, "micro_f1", 0.7),
    "score": (score_scores, "pearson", 0.5),
    "tokens": (tokens_scores, "f1", 0.8),
    "span": (span_scores, "exact", 0.7),
}


@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_of_own_task_is_learned_saved_and_judged(encoder, tmp_path, kind):
    data, out = own_files.own(tmp_path / "data", kind), tmp_path / "out"
    judged = own_files.spoil(own_files.rows(kind, 48, seed=1), kind)
    own_files.write(data / "validation.jsonl", judged)
    result = kdcli("finetune", encoder, "--task", "own", "--data", data, *QUICK, "-o", out)
    assert result.exit_code == 0, result.output
    assert {p.name for p in out.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "recipe.yaml"),
        *("report.json", "report.md", "report.html", "latency.csv", "log.jsonl"),
    }
    config = json.loads((out / "config.json").read_text())
    assert config["finetuning_task"] == "own"
    labels = {
        "score": ["score"],
        "tokens": ["O", "B-LOC"],
        "pair": ["other", "same"],
        "span": None,
    }.get(kind, sorted(NAMES))
    assert labels is None or list(config["id2label"].values()) == labels
    report = report_of(out)
    (evaluation,) = report.evaluations
    assert (evaluation.n, evaluation.split, evaluation.set) == (48, "validation", "")
    compute, metric, least = EXPECTED[kind]
    expected = compute(out, kind, judged)
    assert {name: evaluation.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert least < evaluation.metrics[metric] < 1
    assert report.quality["own"]["finetuned"] == evaluation.metrics
    assert evaluation.worst
    last = log_of(out)[-1]
    assert last["step"] == 40
    # Judged in other micro-batches than after training, so equal but for rounding.
    assert last["metrics"] == pytest.approx(evaluation.metrics, abs=1e-6)
    assert last["held_out"]["loss"] < log_of(out)[0]["held_out"]["loss"]


def test_answers_are_found_without_saying_how_long_a_window_is(tmp_path):
    encoder = own_files.encoder(tmp_path / "encoder", max_position_embeddings=512)
    lines = own_files.rows("span", 16)
    lines[0]["context"] += " w3" * 400
    own_files.write(tmp_path / "train.jsonl", lines)
    asked = ["--max-steps", "1", "--batch-size", "8", "--set", "measure.latency=false", "-o", tmp_path / "out"]
    result = kdcli("finetune", encoder, "--task", "own", "--data", tmp_path / "train.jsonl", *asked)
    assert result.exit_code == 0, result.output
    assert any("more than one window of 384 tokens" in note for note in report_of(tmp_path / "out").notes)


def test_a_run_names_what_it_is_of_and_prints_its_report(given, tmp_path):
    result = kdcli(*given, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "encoder" in result.stdout
    assert "own accuracy" in result.stdout
    assert f"model and report in {tmp_path / 'out'}" in result.stdout.replace("\n", "")
    for name in ("report.md", "report.html", "README.md"):
        assert "accuracy" in (tmp_path / "out" / name).read_text("utf-8")
    assert [r["step"] for r in log_of(tmp_path / "out") if "metrics" in r] == [0, 3, 6, 9, 12]


def test_json_is_the_report_and_nothing_else_on_stdout(given, tmp_path):
    result = kdcli(*given, "-o", tmp_path / "out", "--json", "-q")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert result.stderr == ""


def test_the_same_seed_gives_the_same_bits_and_another_one_others(given, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert kdcli(*given, "--seed", seed, "-o", tmp_path / name).exit_code == 0
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["classifier.weight"], c["classifier.weight"])


def test_a_dry_run_says_what_it_costs_and_leaves_nothing(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    grid = ["--grid", "lr=1e-3,3e-3", "--seeds", "2", "--max-steps", "500"]
    for where in (["-o", tmp_path / "out"], []):
        result = kdcli(*given, *grid, *where, "--dry-run", "--json")
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert [leg["steps"] for leg in said["legs"]] == [500, 500]
        assert all(leg["seconds"] > 0 for leg in said["legs"])
        assert said["models"]["finetuned"]["params_total"] > 0
    assert sorted(tmp_path.rglob("*")) == before


def test_without_an_output_directory_a_free_one_is_numbered(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert kdcli(*given).exit_code == 0
    made = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert made == [f"finetune-{given[1].name}-own", f"finetune-{given[1].name}-own-2"]


def test_resuming_a_finished_run_prints_its_report_again(given, tmp_path):
    kdcli(*given, "-o", tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    result = kdcli(*given, "-o", tmp_path / "out", "--resume")
    assert result.exit_code == 0
    assert "own accuracy" in result.stdout
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before


def test_another_recipe_or_a_foreign_directory_is_refused(given, tmp_path):
    kdcli(*given, "-o", tmp_path / "out")
    before = (tmp_path / "out" / "report.json").read_bytes()
    result = kdcli(*given, "-o", tmp_path / "out", "--resume", "--set", "keep=best", "--lr", "0.01")
    assert result.exit_code == 2
    assert "keep: was" in said_by(result)
    assert "train.lr: was 0.003, is 0.01" in said_by(result)
    assert "--overwrite" in said_by(kdcli(*given, "-o", tmp_path / "out"))
    assert (tmp_path / "out" / "report.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert kdcli(*given, "-o", tmp_path / "mine", "--overwrite").exit_code == 2
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_overwrite_starts_anew(given, tmp_path):
    kdcli(*given, "-o", tmp_path / "out")
    assert kdcli(*given, "-o", tmp_path / "out", "--overwrite", "--max-steps", "6").exit_code == 0
    assert report_of(tmp_path / "out").training.steps == 6


def stop_after(monkeypatch, step):
    """Make the run end as by a power cut, once the log holds a step."""
    from kdcli.training.run_dir import RunDir

    whole = RunDir.log

    def log(self, record):
        whole(self, record)
        if record["step"] == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "log", log)


@pytest.mark.parametrize("keep", ["last", "best"])
@pytest.mark.parametrize("cut", [5, 9])
def test_cut_and_resumed_is_bit_identical(given, tmp_path, monkeypatch, keep, cut):
    given = [*given, "--set", f"keep={keep}", "--set", "train.log_every=1"]
    assert kdcli(*given, "-o", tmp_path / "a").exit_code == 0
    stop_after(monkeypatch, cut)
    assert kdcli(*given, "-o", tmp_path / "b").exit_code == 130
    monkeypatch.undo()
    assert not (tmp_path / "b" / "model.safetensors").exists()
    assert kdcli(*given, "-o", tmp_path / "b", "--resume").exit_code == 0
    a, b = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")
    a, b = (report_of(tmp_path / side) for side in "ab")
    assert a.evaluations == b.evaluations
    assert (a.training.resumed_from_step, b.training.resumed_from_step) == (None, 2 * ((cut - 1) // 2))


def test_the_best_weights_are_kept_and_not_the_last(given, tmp_path, monkeypatch):
    """The last steps go uphill, so that what was learned is lost again."""
    from kdcli.types import Schedule

    monkeypatch.setattr(Schedule, "lr_at", lambda self, step: 3e-3 if step <= 9 else -3e-2)
    long = [*given, "--max-steps", "15"]
    assert kdcli(*long, "-o", tmp_path / "best", "--set", "keep=best").exit_code == 0
    log = log_of(tmp_path / "best")
    scores = {r["step"]: r["metrics"]["accuracy"] for r in log if "metrics" in r and r["step"] > 0}
    best = max(scores, key=scores.get)
    assert scores[best] > scores[15]
    assert report_of(tmp_path / "best").evaluations[0].metrics["accuracy"] == scores[best]
    assert any(
        f"the weights of step {best} were kept, by accuracy on validation" in n
        for n in report_of(tmp_path / "best").notes
    )
    # A run cut after its best step finds them again.
    with monkeypatch.context() as patch:
        stop_after(patch, 12)
        assert kdcli(*long, "-o", tmp_path / "cut", "--set", "keep=best").exit_code == 130
    assert kdcli(*long, "-o", tmp_path / "cut", "--set", "keep=best", "--resume").exit_code == 0
    # They are those that a run of so many steps ends with.
    monkeypatch.setattr(Schedule, "lr_at", lambda self, step: 3e-3)
    assert kdcli(*given, "--max-steps", best, "-o", tmp_path / "short").exit_code == 0
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in ("best", "short", "cut"))
    assert all(torch.equal(a[k], b[k]) and torch.equal(a[k], c[k]) for k in a)
    assert not (tmp_path / "best" / "checkpoints").exists()


@pytest.mark.slow
def test_killed_at_a_random_step_and_resumed_is_bit_identical(given, tmp_path):
    long = [*given, "--max-steps", "60", "--set", "train.log_every=1", "--set", "keep=best"]
    assert kdcli(*long, "-o", tmp_path / "a").exit_code == 0
    processes.killed_at_random(*long, out=tmp_path / "b")
    assert kdcli(*long, "-o", tmp_path / "b", "--resume").exit_code == 0
    a, b = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")


@pytest.mark.slow
def test_two_processes_are_one_with_the_same_global_batch(encoder, tmp_path):
    # Of tokens, whose loss is a mean over as many words as there happen to be; and an odd number of rows is judged.
    data = own_files.own(tmp_path / "data", "tokens", judged=47)
    plain = ["finetune", no_dropout(encoder, tmp_path), "--task", "own", "--data", data, *QUICK, "--device", "cpu"]
    plain += ["--max-steps", "12", *OFTEN, "--set", "keep=best"]
    assert kdcli(*plain, "-o", tmp_path / "one").exit_code == 0
    assert processes.two_ranks(*plain, "-o", tmp_path / "two")[0].count("model and report in") == 1
    for one, other in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        assert set(one) == set(other)
        assert one.get("tokens") == other.get("tokens")
        for key in set(one) - {"step", "tokens"}:
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for key in a:
        # The gradient of a key's bias is zero but for rounding errors, which Adam makes as large as any.
        if not key.endswith("key.bias"):
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)
    one, two = (report_of(tmp_path / name).evaluations[0] for name in ("one", "two"))
    assert one.metrics == pytest.approx(two.metrics, abs=1e-5)


def no_dropout(encoder, tmp_path):
    """The same model without dropout, whose masks are drawn anew in each process."""
    folder = tmp_path / "steady"
    shutil.copytree(encoder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0))
    )
    return folder
