"""`kdcli finetune` end to end on tiny models: what a run learns, writes, resumes and repeats."""

import json
import re
import shlex

import own_files
import pytest
from own_files import (
    QUICK,
    log_of,
    report_of,
    same_weights,
    succeeds,
)

from kdcli.report.text import number

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


def test_a_run_shows_the_trivial_answer_and_warns_if_it_learned_nothing(given, tmp_path):
    done = succeeds(*given, "--lr", "1e-9", "-o", tmp_path / "out")
    score, warning = [
        note for note in report_of(tmp_path / "out").notes if note.startswith("the fine-tuned ")
    ]
    assert re.fullmatch(
        r"the fine-tuned model has accuracy \d\.\d+ on 48 held-out rows; "
        r"answering (brisk|calm)( \(as frequent as \w+\))? to every text has \d\.\d+",
        score,
    )
    said = "may have learned little or nothing: its score is not clearly better than always"
    assert said in warning
    assert "--lr 1e-3" in warning
    assert all(note in " ".join(done.stdout.split()) for note in (score, warning))


def test_a_model_with_a_head_is_compared_with_its_start(given, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    succeeds(*given, "-o", first)
    (before,) = report_of(first).evaluations
    verb, _, *rest = given
    succeeds(verb, first, *rest, "--lr", "3e-2", "-o", again)
    score = number(before.metrics["accuracy"])
    start = f"the model had accuracy {score} before the training and "
    assert [start in note for note in report_of(again).notes].count(True) == 1
    # A new head has no score before the training.
    assert not any("before the training" in note for note in report_of(first).notes)
    # A head with the labels in another order has a start too.
    config = json.loads((first / "config.json").read_text())
    names = [config["id2label"][n] for n in "01"]
    config["id2label"] = dict(zip("10", names, strict=True))
    config["label2id"] = dict(zip(names, (1, 0), strict=True))
    (first / "config.json").write_text(json.dumps(config))
    mapped = ["--set", "head.label_map=[1, 0]", "--max-steps", "1", "-o", tmp_path / "mapped"]
    succeeds(verb, first, *rest, *mapped)
    assert any("before the training" in note for note in report_of(tmp_path / "mapped").notes)


@pytest.mark.parametrize(
    ("kind", "answer"), [("tokens", "O for each word"), ("span", "nothing"), ("score", r"\d\S*")]
)
def test_every_kind_of_label_has_a_trivial_answer(kind, answer, encoder, tmp_path):
    data = own_files.own(tmp_path / "data", kind)
    untrained = ["--lr", "1e-9", "--max-steps", "1", "-o", tmp_path / "out"]
    succeeds("finetune", encoder, "--task", "own", "--data", data, *QUICK, *untrained)
    notes = " ".join(report_of(tmp_path / "out").notes)
    assert re.search(rf"held-out rows; answering {answer} to every text has 0\.0", notes)


def test_another_seed_gives_other_weights(given, tmp_path):
    for seed in (1, 2):
        succeeds(*given, "--seed", seed, "-o", tmp_path / str(seed))
    assert not same_weights(tmp_path / "1", tmp_path / "2")


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
