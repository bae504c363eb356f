"""`kdcli finetune` given what it cannot use: exit 2, one message that names file and row, and nothing left behind."""

from __future__ import annotations

import gzip
import json

import own_files
import pytest
import torch
from own_files import QUICK, kdcli, report_of, said_by, write
from transformers import AutoModelForSequenceClassification, AutoTokenizer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return own_files.encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def data(tmp_path):
    return own_files.own(tmp_path / "data", "class", n=64, judged=16)


def refused(tmp_path, *arguments, code=2):
    """What it said, in one message and without leaving anything."""
    before = sorted(tmp_path.rglob("*"))
    result = kdcli("finetune", *arguments, "-o", tmp_path / "out")
    assert result.exit_code == code, result.output
    assert sorted(tmp_path.rglob("*")) == before
    assert "Traceback" not in result.output
    assert result.stderr.count("error: ") == 1
    assert result.stdout == ""
    return said_by(result)


def test_no_model_and_no_task(encoder, data, tmp_path):
    assert "no model given" in refused(tmp_path)
    assert "no task given" in refused(tmp_path, encoder, "--data", data)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "sst"], "unknown task 'sst'; did you mean 'sst2'?"),
        (["--task", "qwn"], "did you mean 'own'?"),
        (["--task", "own", "--grid", "rl=1,2"], "unknown key 'rl' (--grid)"),
        (["--task", "own", "--grid", "train.lrr=1"], "did you mean 'train.lr'"),
        (["--task", "own", "--grid", "lr="], "--grid takes KEY=VALUE,VALUE…, got 'lr='"),
        (["--task", "own", "--grid", "lr=1e-3,"], "'train.lr' must be a valid number, got None (grid)"),
        (["--task", "own", "--grid", "lr"], "--grid takes KEY=VALUE,VALUE…, got 'lr'"),
        (["--task", "own", "--grid", "lr=fast,slow"], "'train.lr' must be a valid number, got 'fast' (grid)"),
        (["--task", "own", "--grid", "lr=1e-3,-1"], "'train.lr' must be greater than 0"),
        (["--task", "own", "--grid", "lr=1e-3,0.001"], "the grid holds train.lr=0.001 twice"),
        (["--task", "own", "--grid", "seed=1,2"], "--seeds"),
        (["--task", "own", "--grid", "data.max_length=16,24"], "grid.data.max_length: the runs of a grid share"),
        (["--task", "own", "--grid", "model=a,b"], "grid.model: the runs of a grid share"),
        (["--task", "own", "--grid", "dtype=fp32,bf16"], "grid.train.dtype: the runs of a grid share"),
        (["--task", "own", "--grid", "warmup_steps=1,"], "grid.train.warmup_steps must hold values to try, got None"),
        (["--task", "own", "--grid", "warmup_steps=1,40"], "leaves nothing of 40 steps"),
        (["--task", "own", "--set", "grid.train.lr=0.1"], "grid.train.lr must hold a list of values, got 0.1"),
        (
            ["--task", "own", "--set", "choose_on=matched"],
            "choose_on matched is none of the judged sets: there is only one",
        ),
        (["--task", "own", "--seeds", "0"], "'seeds' must be greater than 0, got 0 (option)"),
        (["--task", "own", "--set", "train.warmup_steps=40"], "leaves nothing of 40 steps"),
        (["--task", "own", "--set", "keep=first"], "'keep'"),
        (["--task", "own", "--set", "data.columns.txt=text"], "unknown role 'data.columns.txt'; did you mean 'text'?"),
        (["--task", "own", "--set", "data.columns.text=txt"], "no column 'txt'; did you mean 'text'?"),
        (["--task", "own", "--device", "tpu"], "unknown device"),
        (["--task", "own", "--recipe", "no-such"], "no recipe"),
        (["--task", "sst2"], "task sst2 reads the column 'sentence', which is not there; there are text, label"),
        (["--task", "own", "--data", "/nowhere.txt"], "no data at /nowhere.txt"),
    ],
)
def test_bad_options_are_refused(encoder, data, tmp_path, arguments, said):
    assert said in refused(tmp_path, encoder, "--data", data, *QUICK, *arguments)


def test_own_without_data(encoder, tmp_path):
    assert "task 'own' needs --data" in refused(tmp_path, encoder, "--task", "own")


def changed(rows, number, **values):
    rows[number] = {k: v for k, v in (rows[number] | values).items() if v is not ...}
    return rows


@pytest.mark.parametrize(
    ("file", "number", "values", "said"),
    [
        ("train", 7, {"label": ...}, "column 'label' is not there; there are text"),
        ("train", 7, {"text": ...}, "the column 'text', which is not there; there are label"),
        ("train", 7, {"label": None}, "the label 'label' is missing"),
        ("train", 7, {"label": ["calm"]}, "the label 'label' is a list, ['calm'], but a string at"),
        ("train", 7, {"label": 3}, "the label 'label' is a number, 3, but a string at"),
        ("train", 7, {"text": 5}, "column 'text' must hold text, got int"),
        ("validation", 7, {"label": ...}, "column 'label', the label of task own, is not there"),
        ("validation", 7, {"label": "wild"}, "must be one of 0 (brisk), 1 (calm), got 'wild'"),
        ("validation", 7, {"label": 2}, "must be one of 0 (brisk), 1 (calm), got 2"),
        ("validation", 7, {"text": ...}, "the column 'text', which is not there"),
    ],
)
def test_a_bad_row_is_named(encoder, data, tmp_path, file, number, values, said):
    n = {"train": 64, "validation": 16}[file]
    path = write(data / f"{file}.jsonl", changed(own_files.rows("class", n), number, **values))
    message = refused(tmp_path, encoder, "--task", "own", "--data", data, *QUICK)
    assert f"{path}:{number + 1}:" in message
    assert said in message


@pytest.mark.parametrize("spelled", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("file", ["train", "validation"])
def test_a_target_that_is_no_finite_number_is_named(encoder, tmp_path, file, spelled):
    data = own_files.own(tmp_path / "data", "score", n=64, judged=16)
    path = data / f"{file}.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[5])
    lines[5] = json.dumps(row | {"label": float(spelled)})
    assert spelled in lines[5]
    path.write_text("\n".join(lines))
    message = refused(tmp_path, encoder, "--task", "own", "--data", data, *QUICK)
    assert f"{path}:6" in message
    assert "finite" in message


def damage(path, how):
    """The file as it should not be: empty, cut in the middle, or of another format than its name says."""
    if how == "cut":
        whole = gzip.compress(path.read_bytes())
        path.with_name(f"{path.name}.gz").write_bytes(whole[: len(whole) // 2])
        path.unlink()
        return path.with_name(f"{path.name}.gz")
    path.write_bytes(
        {"empty": b"", "blank": b"\n\n", "not JSON": b'{"text": "w1", "label": "calm"}\n{"text": ', "a list": b"[1]\n"}[
            how
        ]
    )
    return path


@pytest.mark.parametrize("file", ["train", "validation"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("empty", " holds no rows"),
        ("blank", " holds no rows"),
        ("cut", " is not a whole gzip file"),
        ("not JSON", ":2 is not JSON"),
        ("a list", ":1 must be a JSON object, got list"),
    ],
)
def test_a_damaged_file_is_named(encoder, data, tmp_path, file, how, said):
    path = damage(data / f"{file}.jsonl", how)
    message = refused(tmp_path, encoder, "--task", "own", "--data", data, *QUICK)
    assert f"{path}{said}" in message


def test_an_empty_directory_and_a_missing_split(encoder, data, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert "has no file of a known format" in refused(
        tmp_path, encoder, "--task", "own", "--data", tmp_path / "nothing", *QUICK
    )
    (data / "train.jsonl").unlink()
    assert "has no train split; it has validation" in refused(
        tmp_path, encoder, "--task", "own", "--data", data, *QUICK
    )
    assert "has no train split; it has validation" in refused(
        tmp_path, encoder, "--task", "sst2", "--data", data, *QUICK
    )


def test_without_a_validation_split_a_tenth_is_held_back(encoder, data, tmp_path):
    (data / "validation.jsonl").unlink()
    result = kdcli(
        "finetune", encoder, "--task", "own", "--data", data, *QUICK, "--max-steps", "2", "-o", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "out")
    assert [(e.n, e.split) for e in report.evaluations] == [(6, "held back from train")]
    assert "judged on held back from train" in report.notes


def test_a_training_split_too_small_to_hold_a_tenth_back(encoder, tmp_path):
    data = write(tmp_path / "train.jsonl", own_files.rows("class", 9))
    assert "too few to hold some back" in refused(tmp_path, encoder, "--task", "own", "--data", data, *QUICK)


def test_a_test_split_that_is_asked_for_must_be_there(encoder, data, tmp_path):
    asked = [encoder, "--task", "own", "--data", data, *QUICK, "--set", "data.split=test"]
    assert "no test split" in refused(tmp_path, *asked)


def test_labels_of_mixed_types_are_refused(encoder, tmp_path):
    data = own_files.own(tmp_path / "data", "score", n=64, judged=16)
    lines = own_files.rows("score", 64)
    path = write(data / "train.jsonl", changed(lines, 40, label="high"))
    message = refused(tmp_path, encoder, "--task", "own", "--data", data, *QUICK)
    assert f"{path}:41: the label 'label' is a string, 'high', but a number at {path}:1" in message


def test_a_class_that_no_training_example_has(encoder, tmp_path):
    rows = [{"sentence": r["text"], "label": "positive"} for r in own_files.rows("class", 32)]
    write(tmp_path / "data" / "train.jsonl", rows)
    write(tmp_path / "data" / "validation.jsonl", [*rows[:8], {"sentence": "w1", "label": "negative"}])
    message = refused(tmp_path, encoder, "--task", "sst2", "--data", tmp_path / "data", *QUICK)
    assert "no training example has the label negative" in message


def test_numbers_beyond_the_labels_of_a_named_task(encoder, tmp_path):
    rows = [{"sentence": r["text"], "label": i % 2} for i, r in enumerate(own_files.rows("class", 32))]
    for file, number in (("train", 30), ("validation", 3)):
        write(tmp_path / "data" / "train.jsonl", rows)
        write(tmp_path / "data" / "validation.jsonl", rows[:8])
        write(tmp_path / "data" / f"{file}.jsonl", changed([dict(r) for r in rows], number, label=2))
        message = refused(tmp_path, encoder, "--task", "sst2", "--data", tmp_path / "data", *QUICK)
        assert (
            f"{file}.jsonl:{number + 1}: 'label' of task sst2 must be one of 0 (negative), 1 (positive), got 2"
            in message
        )


def test_words_and_tags_of_different_number(encoder, tmp_path):
    data = own_files.own(tmp_path / "data", "tokens", n=64, judged=16)
    lines = own_files.rows("tokens", 64)
    path = write(data / "train.jsonl", changed(lines, 9, ner_tags=["O"]))
    message = refused(tmp_path, encoder, "--task", "own", "--data", data, *QUICK)
    assert f"{path}:10:" in message
    assert "'ner_tags' must hold a label for each of the" in message


def misplace(lines, numbers):
    for number in numbers:
        start = lines[number]["answers"]["answer_start"][0]
        lines[number]["answers"]["answer_start"] = [start + 1]
    return lines


def test_few_misplaced_answers_are_left_out_and_listed(encoder, tmp_path):
    data = own_files.own(tmp_path / "data", "span", n=200, judged=16)
    path = write(data / "train.jsonl", misplace(own_files.rows("span", 200), [123]))
    result = kdcli(
        "finetune", encoder, "--task", "own", "--data", data, *QUICK, "--max-steps", "4", "-o", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    notes = report_of(tmp_path / "out").notes
    assert notes[0] == "1 training questions were left out:"
    assert notes[1].startswith(f"{path}:124: answer 'w30' is not at character")
    assert "199 rows of" in said_by(result)


def test_many_misplaced_answers_are_refused(encoder, tmp_path):
    data = own_files.own(tmp_path / "data", "span", n=200, judged=16)
    path = write(data / "train.jsonl", misplace(own_files.rows("span", 200), range(0, 200, 20)))
    message = refused(tmp_path, encoder, "--task", "own", "--data", data, *QUICK)
    assert "10 of 200 answers are not where they are said to be" in message
    assert f"{path}:1: answer 'w30' is not at character" in message
    assert "answer_start counts characters of the context, from 0" in message


def test_a_choice_on_a_set_that_is_not_there(encoder, tmp_path):
    rows = [
        {"premise": r["text"], "hypothesis": "w1", "label": i % 3} for i, r in enumerate(own_files.rows("class", 32))
    ]
    write(tmp_path / "data" / "train.jsonl", rows)
    for name in ("matched", "mismatched"):
        write(tmp_path / "data" / f"validation_{name}.jsonl", rows[:9])
    asked = [encoder, "--task", "mnli", "--data", tmp_path / "data", *QUICK, "--set", "choose_on=matchd"]
    assert "choose_on matchd is none of the judged sets: matched, mismatched" in refused(tmp_path, *asked)


def test_a_checkpoint_with_the_labels_in_another_order(tmp_path):
    """Fine-tuned on as it stands, its head would begin by being wrong about everything."""
    data = own_files.own(tmp_path / "data", "class", n=64, judged=16)
    model = own_files.headed(tmp_path / "model", ("calm", "brisk"))
    asked = [model, "--task", "own", "--data", data, *QUICK]
    message = refused(tmp_path, *asked)
    assert "has the labels of own in another order: 0 calm, 1 brisk; the data: 0 brisk, 1 calm" in message
    assert "--set head.label_map='[1, 0]'" in message
    assert "must hold each of 0 … 1 once" in refused(tmp_path, *asked, "--set", "head.label_map=[0,0]")
    done = kdcli("finetune", *asked, "--set", "head.label_map=[1, 0]", "--max-steps", "2", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "its own head, in the data's order of labels" in said_by(done)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["id2label"] == {"0": "brisk", "1": "calm"}
    # Step 0 of the log is the head as it came.
    stock = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer, right = AutoTokenizer.from_pretrained(model), 0
    for row in own_files.rows("class", 16, seed=1):
        with torch.no_grad():
            said = stock(**tokenizer(row["text"], return_tensors="pt")).logits[0].argmax()
        right += stock.config.id2label[int(said)] == row["label"]
    assert report_of(tmp_path / "out").curve[0].metrics["accuracy"] == right / 16


def test_a_directory_that_is_no_model(data, tmp_path):
    (tmp_path / "empty").mkdir()
    asked = ["--task", "own", "--data", data, *QUICK]
    assert "has no config.json" in refused(tmp_path, tmp_path / "empty", *asked)
    assert "no model directory" in refused(tmp_path, tmp_path / "nowhere", *asked)
