"""Every verb that reads labelled rows accounts for each of them, and `--strict-data` refuses each
kind of row that the data is to blame for."""

import json
import shlex

import own_files
import pytest
from fake_verbs import Fakes
from own_files import encoder, headed, refused, report_of, said_by, succeeds

from kdcli.data.accounts import ACCOUNTS

# Words without digits, which have vectors to choose copies of rows by.
LETTERS = str.maketrans("0123456789", "abcdefghij")
GOOD = [row | {"text": row["text"].translate(LETTERS)} for row in own_files.rows("class", 60)]
LONG = {"text": " ".join(f"w{n % 6}" for n in range(60)), "label": "calm"}
DATA = "--task own --set data.max_length=16 --set data.skip_bad=true --set data.judged_rows=8"
SCORE = shlex.split(f"{DATA} --set measure.latency=false")
TRAIN = [
    *SCORE,
    *shlex.split("--set data.train_rows=30 --max-steps 1 --batch-size 8 --dtype fp32"),
    *shlex.split("--set train.warmup_steps=0"),
]
TEXT = shlex.split("--max-steps 1 --batch-size 4 --set measure.latency=false")
# Verb -> model and options. BASE, TEACHER and WORDS are files of `given`.
VERBS = {
    "finetune": ["BASE", *TRAIN],
    "distill": ["TEACHER", "--to", "1x16", *TRAIN],
    "distill augment": ["TEACHER", "--to", "1x32", "--augment", "--glove", "WORDS", *TRAIN],
    "prune": ["TEACHER", "--method", "magnitude", "--sparsity", "0.5", *TRAIN],
    "cotrain": ["2x16", "1x16", "--base", "BASE", *TRAIN],
    "evaluate": ["TEACHER", *SCORE],
    "compress": ["TEACHER", *shlex.split(DATA), "--max-drop", "100"],
}
# What is wrong with the sixth line of a file -> the line, and what the refusal says about it.
FAULTS = {
    "blank": ("", "1 empty (first: {place})"),
    "bad": (json.dumps({"text": "w1 w2", "label": None}), "1 bad (first: {place})"),
    "no text": (json.dumps({"text": " ", "label": "calm"}), "1 row without any text: {place}"),
    "repeated": (
        json.dumps(GOOD[0]),
        "repeat an earlier text (up to case and spaces; first: {place})",
    ),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    words = [f"w{n}".translate(LETTERS) for n in range(40)]
    vectors = "".join(f"{word} {n % 7} {n % 5} 1\n" for n, word in enumerate(words))
    (folder / "words.txt").write_text(vectors)
    return {
        "WORDS": folder / "words.txt",
        "BASE": encoder(folder / "base"),
        "TEACHER": headed(folder / "teacher", ("brisk", "calm"), num_hidden_layers=2),
    }


def written(path, *lines):
    """Write good rows, with lines from the sixth one on."""
    good = [json.dumps(row) for row in GOOD]
    path.write_text("\n".join([*good[:5], *lines, *good[5:]]) + "\n", "utf-8")
    return path


def command(name, given, file):
    """Return the words of a verb's command line."""
    words = [given.get(word, word) for word in VERBS[name]]
    return [name.split()[0], *words, "--data", file]


def check_account(account, log):
    """Check that an account adds up, and that the log has it; return its reasons."""
    assert account.read == account.kept + sum(one.count for one in account.left_out)
    assert f"rows of rows.jsonl: {account.read} read, {account.kept} kept; left out: " in log
    for one in account.left_out:
        assert f"{one.count} {one.reason} (first: " in log
    return {one.reason: (one.count, one.first) for one in account.left_out}


@pytest.mark.parametrize("name", [name for name in VERBS if name != "compress"])
def test_an_account_adds_up_and_is_the_same_in_log_and_report(given, tmp_path, name):
    faults = [line for line, _ in FAULTS.values()]
    file = written(tmp_path / "rows.jsonl", *faults, json.dumps(LONG))
    result = succeeds(*command(name, given, file), "-o", tmp_path / "out")
    log = said_by(result)
    (account,) = report_of(tmp_path / "out").accounts
    reasons = check_account(account, log)
    assert account.read == 65
    assert reasons["empty"] == (1, "rows.jsonl:6")
    assert reasons["bad"] == (1, "rows.jsonl:7")
    assert reasons["over the number of rows asked for"][0] == 63 - account.kept
    assert account.kept == 8 if name == "evaluate" else 30 < account.kept <= 38


@pytest.mark.parametrize("name", VERBS)
def test_strict_data_refuses_each_kind_of_row_with_its_place(given, tmp_path, name):
    # The rows are chosen by their hashes, so the limits are lifted.
    limits = ["--set", "data.judged_rows=null"]
    limits += ["--set", "data.train_rows=null"] if "data.train_rows=30" in VERBS[name] else []
    for line, said in FAULTS.values():
        file = written(tmp_path / "rows.jsonl", line)
        message = refused(tmp_path, *command(name, given, file), *limits, "--strict-data")
        assert said.format(place=f"{file}:6") in message


@pytest.mark.parametrize("name", ["finetune", "evaluate"])
def test_strict_data_allows_what_the_recipe_asks_for(given, tmp_path, name):
    file = written(tmp_path / "rows.jsonl", json.dumps(LONG))
    succeeds(*command(name, given, file), "--strict-data", "-o", tmp_path / "out")
    (account,) = report_of(tmp_path / "out").accounts
    assert [one.reason for one in account.left_out] == ["over the number of rows asked for"]


def test_every_step_of_a_compression_has_the_account_of_its_rows(given, tmp_path, capsys):
    """Steps with the same rows read them once; each of their reports has the account."""
    ACCOUNTS.clear(strict=False)
    file = written(tmp_path / "rows.jsonl", "", json.dumps(LONG))
    train = {"max_steps": 1, "batch_size": 8, "lr": 1e-3, "dtype": "fp32", "warmup_steps": 0}
    times = {"1x16": 4.0}
    Fakes({}, in_earnest=True, ms=times).compress(
        model=str(given["TEACHER"]),
        data__source=str(file),
        data__max_length=16,
        plan__backends=["onnx"],
        plan__shapes=list(times),
        plan__prune=None,
        plan__distill={"method": "soft-targets", "train": train},
        plan__trim_from=1.0,
        goal__max_drop=100.0,
        measure__min_runs=2,
        measure__min_seconds=0.0,
        output_dir=tmp_path / "out",
    )
    log = " ".join(capsys.readouterr().err.split())
    folders = [path.parent for path in (tmp_path / "out").rglob("report.json")]
    for folder in folders:
        (account,) = report_of(folder).accounts
        reasons = check_account(account, log)
        assert (account.read, reasons["empty"]) == (62, (1, "rows.jsonl:6")), folder
    assert len(folders) >= 4


@pytest.mark.parametrize("workers", [1, 2])
def test_tokenize_has_an_account_and_refuses_empty_rows(given, tmp_path, workers):
    no_text, blank = json.dumps({"text": " ", "label": "calm"}), ""
    file = written(tmp_path / "rows.jsonl", blank, no_text, json.dumps(GOOD[0]))
    words = "tokenize", file, "--tokenizer", given["BASE"], "--workers", workers
    line = f"rows of rows.jsonl: 63 read, 61 kept; left out: 2 empty (first: {file}:6)"
    strict = "63 read, 60 kept; left out: 2 empty (first: {0}:6), 1 repeated (first: {0}:8)"
    assert strict.format(file) in refused(tmp_path, *words, "--strict-data")
    assert line in said_by(succeeds(*words, "-o", tmp_path / "tokens"))
    # The shards of another run are refused, and stay.
    before = own_files.times(tmp_path)
    result = own_files.kdcli(*words, "--strict-data", "-o", tmp_path / "tokens")
    assert (result.exit_code, strict.format(file) in said_by(result)) == (2, True)
    assert own_files.times(tmp_path) == before
    written(tmp_path / "rows.jsonl")
    succeeds(*words, "--strict-data", "-o", tmp_path / "clean")


@pytest.mark.parametrize(
    ("verb", "column"),
    [
        *(("trim", ""), ("trim", "text"), ("export", ""), ("distill", "text"), ("tokenize", "")),
        ("adapt", "text"),
    ],
)
def test_strict_data_refuses_a_repeated_text_of_every_verb(given, tmp_path, verb, column):
    words = {
        "trim": ["trim", given["BASE"], "--data"],
        "export": ["export", given["BASE"], "--format", "onnx", "--int8", "--data"],
        "distill": ["distill", given["BASE"], "--to", "1x16", *TEXT, "--data"],
        "tokenize": ["tokenize", "--tokenizer", given["BASE"]],
        "adapt": ["adapt", given["BASE"], "--pooling", "mean", "--index", "no.npy", "--data"],
    }[verb]
    chosen = ["--set", f"data.column={column}"] if column else []
    file = written(tmp_path / "rows.jsonl", json.dumps(GOOD[0] | {"text": f"  {GOOD[0]['text']}"}))
    message = refused(tmp_path, *words, file, *chosen, "--strict-data")
    assert f"61 read, 60 kept; left out: 1 repeated (first: {file}:6)" in message


def test_splits_of_equal_size_have_accounts_of_their_own(given, tmp_path):
    (tmp_path / "rows").mkdir()
    rows = [json.dumps(row) for row in own_files.rows("class", 60)]
    for split in ("train", "validation"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text("\n".join([*rows, "", ""]))
    succeeds("trim", given["BASE"], "--data", tmp_path / "rows", "-o", tmp_path / "out")
    counts = {each.rows: (each.read, each.kept) for each in report_of(tmp_path / "out").accounts}
    assert counts == {"rows": (61, 60), "validation rows": (61, 60)}
