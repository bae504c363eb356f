"""`kdcli finetune --grid --seeds`: every run has its own directory; the best mean over seeds is
chosen."""

import itertools
import math
import shlex
from dataclasses import replace

import own_files
import pytest
from own_files import (
    QUICK,
    interrupted_when,
    kdcli,
    report_of,
    said_by,
    same_weights,
    succeeds,
    times,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAMES = [f"lr={lr},seed={seed}" for lr in ("0.0003", "0.003") for seed in (5, 6)]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Two learning rates, the lower one too low, with two seeds each."""
    folder = tmp_path_factory.mktemp("given")
    data = own_files.own(folder / "data", "class")
    own_files.write(
        data / "validation.jsonl", own_files.spoil(own_files.rows("class", 48, seed=1), "class")
    )
    grid = shlex.split(
        "--grid lr=3e-4,3e-3 --seeds 2 --seed 5 --max-steps 10 --set train.eval_every=5"
    )
    encoder = own_files.encoder(folder / "encoder")
    return [
        "finetune",
        encoder,
        "--task",
        "own",
        "--data",
        data,
        *QUICK,
        "--set",
        "train.checkpoint_every=2",
        *grid,
    ]


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("grid") / "out"
    return out, succeeds(*given, "-o", out)


def test_every_run_reports_itself(whole):
    out, _ = whole
    assert sorted(p.name for p in (out / "runs").iterdir()) == NAMES
    for name in NAMES:
        report = report_of(out / "runs" / name)
        lr, seed = (part.split("=")[1] for part in name.split(","))
        assert (report.recipe["train"]["lr"], report.recipe["train"]["seed"]) == (
            float(lr),
            int(seed),
        )
        assert (report.recipe["grid"], report.recipe["seeds"]) == ({}, 1)
        assert not (out / "runs" / name / "checkpoints").exists()
        assert report.latency == []


def test_the_setting_of_the_best_mean_is_chosen_and_its_best_seed(whole):
    out, result = whole
    report, runs = report_of(out), {name: report_of(out / "runs" / name) for name in NAMES}
    scores = {name: runs[name].evaluations[0].metrics["accuracy"] for name in NAMES}
    means = {lr: sum(scores[f"lr={lr},seed={s}"] for s in (5, 6)) / 2 for lr in ("0.0003", "0.003")}
    assert means["0.003"] > means["0.0003"]
    best = max(NAMES[2:], key=scores.get)
    selection = report.selection
    assert selection.settings == {"train.lr": 0.003}
    assert selection.seed == int(best.rpartition("=")[2])
    assert (selection.metric, selection.on) == ("accuracy", "validation")
    assert [(r.settings, r.seed, r.metrics) for r in selection.runs] == [
        ({"train.lr": float(lr)}, seed, runs[f"lr={lr},seed={seed}"].evaluations[0].metrics)
        for lr in ("0.0003", "0.003")
        for seed in (5, 6)
    ]
    for part in ("evaluations", "curve", "training"):
        assert getattr(report, part) == getattr(runs[best], part)
    # Mean and sample standard deviation of both settings are shown.
    for lr in ("0.0003", "0.003"):
        a, b = (scores[f"lr={lr},seed={s}"] for s in (5, 6))
        deviation = math.sqrt(((a - means[lr]) ** 2 + (b - means[lr]) ** 2) / (2 - 1))
        for text in (
            *((out / name).read_text("utf-8") for name in ("report.md", "report.html")),
            result.stdout,
        ):
            assert f"{means[lr]:.4f} ± {deviation:.2g}" in text
    assert "chosen by accuracy (validation; mean over its seeds)" in " ".join(result.stdout.split())


def test_a_setting_is_not_chosen_for_one_lucky_seed(given, tmp_path, monkeypatch):
    scores = iter([0.1, 0.95, 0.6, 0.7, 0.65, 0.6])
    monkeypatch.setattr("kdcli.verbs.finetune.run.summed_up", lambda *_: {"accuracy": next(scores)})
    options = [o.replace("3e-4,3e-3", "1e-3,2e-3,3e-3") if isinstance(o, str) else o for o in given]
    succeeds(*options, "--max-steps", "1", "-o", tmp_path / "out")
    selection = report_of(tmp_path / "out").selection
    assert (selection.settings, selection.seed) == ({"train.lr": 2e-3}, 6)
    assert [r.metrics["accuracy"] for r in selection.runs] == [0.1, 0.95, 0.6, 0.7, 0.65, 0.6]


def test_only_the_chosen_model_is_kept(given, whole, tmp_path):
    out, _ = whole
    chosen = out / "runs" / f"lr=0.003,seed={report_of(out).selection.seed}"
    assert {p.parent for p in out.rglob("*.safetensors")} == {out}
    for name in ("config.json", "log.jsonl", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (chosen / name).read_bytes()
    assert AutoTokenizer.from_pretrained(out)("w1 w2")["input_ids"]
    # The same run by itself leaves the same weights.
    at = given.index("--grid")
    alone = [*given[:at], *given[at + 6 :], "--lr", "3e-3", "--seed", report_of(out).selection.seed]
    succeeds(*alone, "-o", tmp_path / "alone")
    assert same_weights(out, tmp_path / "alone")
    card, other = (report_of(folder).cards["finetuned"] for folder in (out, chosen))
    assert replace(card, id="") == replace(other, id="")
    assert card.bytes == (out / "model.safetensors").stat().st_size
    assert AutoModelForSequenceClassification.from_pretrained(out).config.id2label == {
        0: "brisk",
        1: "calm",
    }


def test_a_finished_grid_is_not_repeated_and_another_grid_is_refused(given, whole):
    out, _ = whole
    before = times(out)
    again = succeeds(*given, "-o", out, "--resume")
    assert "is done already" in again.stderr
    assert "0.003" in again.stdout
    changed = [o.replace("3e-4,3e-3", "3e-4,1e-3") if isinstance(o, str) else o for o in given]
    other = kdcli(*changed, "-o", out, "--resume")
    assert other.exit_code == 2
    assert "grid.train.lr: was" in said_by(other)
    assert times(out) == before


def test_a_cut_grid_resumes_without_repeating_a_finished_run(given, whole, tmp_path, monkeypatch):
    """Cut while a record is logged: in the third run."""
    records, cut = itertools.count(1), 23
    out, each = tmp_path / "out", ["--set", "train.log_every=1"]
    stopped = interrupted_when(
        monkeypatch, lambda folder, step: next(records) == cut, *given, *each, "-o", out
    )
    assert stopped.exit_code == 130
    done = {p: t for r in (out / "runs").glob("*/report.json") for p, t in times(r.parent).items()}
    assert len({p.parent for p in done}) == cut // 11
    assert not (out / "report.json").exists()
    again = succeeds(*given, *each, "-o", out, "--resume")
    assert again.stderr.count("is done already") == cut // 11
    # Models that were not chosen are deleted at the end.
    assert {p.name for p in done if not p.exists()} <= {
        "model.safetensors",
        "training_rows.safetensors",
    }
    assert {p: p.stat().st_mtime_ns for p in done if p.exists()} == {
        p: t for p, t in done.items() if p.exists()
    }
    one, other = report_of(out), report_of(whole[0])
    assert (one.selection, one.evaluations) == (other.selection, other.evaluations)
    assert one.cards["finetuned"].sha256 == other.cards["finetuned"].sha256


def test_seeds_without_a_grid(given, tmp_path):
    result = succeeds(
        *given[: given.index("--grid")], "--max-steps", "4", "--seeds", "3", "-o", tmp_path / "out"
    )
    selection = report_of(tmp_path / "out").selection
    assert ([r.seed for r in selection.runs], selection.settings) == ([0, 1, 2], {})
    values = [r.metrics["accuracy"] for r in selection.runs]
    assert selection.seed == values.index(max(values))
    assert f"Of 3 runs, seed {selection.seed} was chosen by accuracy" in " ".join(
        result.stdout.split()
    )


def test_a_grid_of_one_value_trains_with_it_in_the_directory_itself(given, tmp_path):
    succeeds(
        *given[: given.index("--grid")],
        *shlex.split(f"--grid lr=1e-4 --max-steps 1 -o {tmp_path}/out"),
    )
    report = report_of(tmp_path / "out")
    assert (report.recipe["train"]["lr"], report.selection) == (1e-4, None)
    assert not (tmp_path / "out" / "runs").exists()


@pytest.fixture
def two_sets(tmp_path):
    """A task with two sets; all labels of the second are wrong, so a model is right on one of them
    only."""
    texts = [r["text"] for r in own_files.rows("class", 96)]
    rows = [{"premise": text, "hypothesis": text, "label": i % 2} for i, text in enumerate(texts)]
    rare = {"premise": "w40", "hypothesis": "w40", "label": 2}
    own_files.write(tmp_path / "data" / "train.jsonl", [*rows, rare])
    right = [r | {"hypothesis": f"{r['hypothesis']} w1"} for r in rows[:24]]
    own_files.write(tmp_path / "data" / "validation_matched.jsonl", right)
    wrong = [r | {"label": 1 - r["label"]} for r in right]
    own_files.write(tmp_path / "data" / "validation_mismatched.jsonl", wrong)
    return [
        "--task",
        "mnli",
        "--data",
        tmp_path / "data",
        *QUICK,
        *shlex.split("--max-steps 8 --grid lr=1e-5,3e-3"),
    ]


def test_the_set_that_chooses_is_named_and_obeyed(given, two_sets, tmp_path):
    options = ["--set", "choose_on=mismatched"]
    succeeds("finetune", given[1], *two_sets, *options, "-o", tmp_path / "out")
    selection = report_of(tmp_path / "out").selection
    assert (selection.on, selection.settings) == ("mismatched validation", {"train.lr": 1e-5})
    for run in selection.runs:
        assert run.metrics["accuracy"] == run.metrics["mismatched/accuracy"]
