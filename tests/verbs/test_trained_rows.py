"""Every model that a command writes knows the rows that trained it; no command judges by them."""

import ast
import shlex
from pathlib import Path

import numpy as np
import own_files
import pytest
from own_files import QUICK, refused, report_of, succeeds, write
from reading import read_task

import kdcli
from kdcli.data.labelled.partition import hashes_of
from kdcli.deploy.sparse.mask_file import read_mask
from kdcli.errors import UsageError
from kdcli.models.model import ROWS_FILE, all_rows, training_rows, write_training_rows

SHORT = [*QUICK, "--max-steps", "2", "--device", "cpu"]
COLUMNS = ["--set", "data.columns.text=saying", "--set", "data.columns.label=about"]
SHARED, NEW = 50, 40


def sayings(count, begin=0):
    """Rows of columns that no convention names, all different."""
    rows = [
        (f"w{i % 40} w{i // 40} w{i % 7}", own_files.NAMES[i % 2])
        for i in range(begin, begin + count)
    ]
    return [{"saying": text, "about": label, "remark": text[::-1]} for text, label in rows]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model fine-tuned on a file without a validation split: folder, file and the rows that
    trained it."""
    folder = tmp_path_factory.mktemp("made")
    file = write(folder / "sayings.jsonl", sayings(300))
    base = own_files.encoder(folder / "base", num_hidden_layers=2)
    succeeds(
        "finetune", base, "--task", "own", "--data", file, *COLUMNS, *SHORT, "-o", folder / "model"
    )
    columns = {"text": "saying", "label": "about"}
    split = read_task("own", file, columns=columns)
    return folder, file, split


def test_a_model_keeps_the_hashes_of_its_training_rows_and_hands_them_on(made, tmp_path):
    folder, _, split = made
    known = training_rows(str(folder / "model"))
    assert (known == split.rows).all()
    assert len(known) + len(np.unique(hashes_of(split.sets[""]))) == 300
    # A student of fewer rows of other data knows its own and its teacher's.
    more = write(tmp_path / "more.jsonl", sayings(120, 2000))
    out = tmp_path / "student"
    options = [
        *shlex.split("--to 1x32 --method minilm --set data.train_rows=30 --set cache_gb=0"),
        *SHORT,
    ]
    succeeds("distill", folder / "model", "--task", "own", "--data", more, *options, "-o", out)
    student = training_rows(str(out))
    assert len(student) == len(known) + 30
    assert np.isin(known, student).all()
    for inside in ("start", "intermediate"):
        assert np.isin(known, training_rows(str(out / inside))).all()


def test_pruned_and_masked_models_know_them_too(made, tmp_path):
    folder, file, split = made
    out, applied = tmp_path / "pruned", tmp_path / "applied"
    # Columns, task and length are the fine-tuned model's.
    smp = ["--method", "smp", "--set", "head.kind=scratch", *SHORT]
    succeeds("prune", folder / "model", *smp, "--data", file, "-o", out)
    for where in (out, out / "compact"):
        assert (training_rows(str(where)) == split.rows).all()
    mask = out / "mask" / "mask.safetensors"
    assert (read_mask(mask).rows == split.rows).all()
    succeeds("mask", "apply", mask, "-o", applied)
    assert (training_rows(str(applied)) == split.rows).all()
    assert len(training_rows(str(folder / "base"))) == 0


def test_evaluate_takes_the_rows_held_back_and_leaves_training_rows_out(made, tmp_path):
    folder, file, split = made
    judged = ["evaluate", folder / "model", "--set", "measure.latency=false", "--device", "cpu"]
    said = succeeds(*judged, "--data", file, "-o", tmp_path / "same").output
    assert "model: data.columns.text=saying, data.columns.label=about" in said.replace("\n", " ")
    (same,), (own,) = (
        report_of(where).evaluations for where in (tmp_path / "same", folder / "model")
    )
    assert (same.n, same.split, same.metrics) == (own.n, "held-out rows", own.metrics)
    other = write(tmp_path / "other.jsonl", [*sayings(300, 2000), *trained(split)[:SHARED]])
    succeeds(*judged, "--data", other, "-o", tmp_path / "mixed")
    report = report_of(tmp_path / "mixed")
    assert report.notes[0] == (
        f"skipped {SHARED} of 350 rows: {folder / 'model'} was trained on them, so their scores "
        "would be too high; 300 rows remain"
    )
    assert [e.n for e in report.evaluations] == [300]
    only = write(tmp_path / "only" / "validation.jsonl", trained(split)[:SHARED]).parent
    assert f"cannot evaluate on {SHARED} of {SHARED} rows of validation" in refused(
        tmp_path, *judged, "--data", only
    )
    all_the_same = [
        "--data",
        only,
        "--set",
        "data.judge_trained_rows=true",
        "-o",
        tmp_path / "only" / "out",
    ]
    succeeds(*judged, *all_the_same)
    (kept,) = report_of(tmp_path / "only" / "out").evaluations
    assert (kept.n, kept.split) == (
        SHARED,
        f"validation, {SHARED} of {SHARED} rows trained a model",
    )


def trained(split):
    return [
        {"saying": e.texts[0], "about": split.task.labels[e.label], "remark": ""}
        for e in split.train
    ]


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("compress", "--max-drop 1"),
        ("compress", "--task own --max-drop 1"),
        ("trim", "--max-drop 1"),
        ("finetune", "--task own"),
        ("cotrain", "1x32 --task own"),
    ],
)
def test_other_verbs_read_the_columns_of_the_training(made, verb, options, tmp_path):
    file = write(tmp_path / "few.jsonl", sayings(4, 2000))
    message = refused(tmp_path, verb, made[0] / "model", "--data", file, *shlex.split(options))
    assert "model: data.columns.text=saying, data.columns.label=about" in message
    assert "too few" in message


def test_a_benchmark_leaves_them_out(made, tmp_path):
    folder, _, split = made
    other = write(tmp_path / "other.jsonl", [*sayings(NEW, 2000), *trained(split)[:SHARED]])
    short = shlex.split(
        "--batch-size 1 --seq-len 8 --set measure.min_runs=2 --set measure.min_seconds=0"
    )
    options = ["--task", "own", "--data", other, "--device", "cpu", *short]
    succeeds("benchmark", folder / "model", *options, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert [e.n for e in report.evaluations] == [NEW]
    assert report.notes == [
        f"skipped {SHARED} of {SHARED + NEW} rows: model was trained on them, so their scores "
        f"would be too high; {NEW} rows remain"
    ]


def test_a_pair_knows_the_rows_of_both(made, tmp_path):
    folder, _, split = made
    file, out = write(tmp_path / "more.jsonl", sayings(120, 2000)), tmp_path / "pair"
    options = ["--task", "own", "--data", file, *COLUMNS, "--set", "standalone=false", *SHORT]
    succeeds("cotrain", folder / "model", "1x32", "--base", folder / "base", *options, "-o", out)
    for name in ("teacher", "student"):
        rows = training_rows(str(out / name))
        assert np.isin(split.rows, rows).all()
        assert len(rows) > len(split.rows)


def test_every_command_that_saves_a_model_says_which_rows_trained_it():
    root = Path(kdcli.__file__).parent
    files = [*root.glob("verbs/**/*.py"), *root.glob("workloads/*.py")]
    calls = [
        n
        for f in files
        for n in ast.walk(ast.parse(f.read_text("utf-8")))
        if isinstance(n, ast.Call)
    ]
    saving = [
        ast.unparse(call)
        for call in calls
        if getattr(call.func, "id", "") == "save_model" and len(call.args) != 4
    ]
    assert sum(getattr(call.func, "id", "") == "save_model" for call in calls) >= 10
    assert saving == []


def test_a_record_is_sorted_once_each_and_damage_is_refused(tmp_path):
    write_training_rows(tmp_path, np.array([2**63 + 5, 3, 3], np.uint64))
    assert training_rows(str(tmp_path)).tolist() == [3, 2**63 + 5]
    assert all_rows(training_rows(str(tmp_path)), np.array([1], np.uint64)).tolist() == [
        1,
        3,
        2**63 + 5,
    ]
    (tmp_path / ROWS_FILE).write_bytes((tmp_path / ROWS_FILE).read_bytes()[:-3])
    with pytest.raises(UsageError, match=r"training_rows.safetensors is damaged"):
        training_rows(str(tmp_path))
    assert len(training_rows(str(tmp_path / "nowhere" / "at" / "all"))) == 0
