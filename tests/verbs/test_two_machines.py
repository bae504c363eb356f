"""Two machines that share nothing but a network: each has a working directory, a cache and an
environment."""

import os
import shutil
import sys
import time

import own_files
import pytest
import torch
from forked import Forked, free_port

from kdcli.cli import main

STEADY = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # each process draws its own masks
SHORT = ["--max-steps", "24", "--batch-size", "16", "--lr", "3e-3", "--dtype", "fp32", "-o", "out"]
SETS = (
    "train.log_every=1",
    "train.checkpoint_every=6",
    "data.max_length=24",
    "measure.latency=false",
)
SHORT += [part for each in SETS for part in ("--set", each)]
VERBS = {
    "finetune": ["finetune", "encoder", "--task", "own", "--data", "data", *SHORT],
    "distill": ["distill", "encoder", "--to", "1x32", "--data", "data/train.jsonl", *SHORT],
}
VERBS["distill"] += ["--set", "data.column=text", "--set", "data.held_out_blocks=4"]


@pytest.fixture
def machines(tmp_path):
    """The directories of two machines, and of one that works alone."""
    for name in ("alone", "first", "second"):
        own_files.encoder(tmp_path / name / "encoder", **STEADY)
        own_files.own(tmp_path / name / "data", "class", judged=47)
    return [tmp_path / "first", tmp_path / "second"]


def _on(machine, words):
    os.chdir(machine)
    sys.argv = ["kdcli", *words]
    main()


def start(machines, *commands):
    """Start a command on both machines, or one on each."""
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "ACCELERATE_USE_CPU": "true",
    }
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    own = [
        common | {"RANK": str(rank), "KDCLI_CACHE": str(machine / "cache")}
        for rank, machine in enumerate(machines)
    ]
    words = [commands[0], commands[-1]]
    return [Forked(_on, *what, **where) for *what, where in zip(machines, words, own, strict=True)]


def end(both, *codes):
    said = [one.communicate() for one in both]
    assert tuple(one.returncode for one in both) == codes, said
    return [stderr for _, stderr in said]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "killed"), [("finetune", 0), ("distill", 1)])
def test_they_train_are_killed_and_go_on_as_one_process_would(machines, verb, killed, monkeypatch):
    words = VERBS[verb]
    alone, (first, second) = machines[0].with_name("alone"), machines
    monkeypatch.chdir(alone)
    own_files.succeeds(*words)
    log, both = first / "out" / "log.jsonl", start(machines, [*words, "--resume", "auto"])
    while not (log.exists() and log.read_text("utf-8").count("\n") > 9):
        assert both[0].returncode is None, both[0].communicate()
        time.sleep(0.01)
    both[killed].kill()
    said = end(both, *((-9, 3) if killed == 0 else (3, -9)))
    assert said[1 - killed].count("error: another process of this run has ended") == 1
    end(start(machines, [*words, "--resume", "auto"]), 0, 0)
    assert own_files.report_of(first / "out").training.resumed_from_step >= 6
    assert not (second / "out").exists()
    own_files.same_logs(alone / "out", first / "out", rel=1e-4, abs=1e-5)
    one, two = (own_files.weights(machine / "out") for machine in (alone, first))
    for key in one:
        # A key bias has a gradient of rounding errors alone, which Adam scales up.
        if not key.endswith("key.bias"):
            torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--lr", "0.1"], "train.lr: 0.003 in process 0, 0.1 in process 1"),
        ([], "hash of the training examples"),
    ],
)
def test_what_differs_between_them_is_said_once_and_nothing_is_written(machines, changes, message):
    words = VERBS["finetune"]
    if not changes:
        own_files.write(machines[1] / "data" / "train.jsonl", own_files.rows("class", 128, seed=5))
    said = end(start(machines, words, [*words, *changes]), 2, 2)
    assert said[0].count("error: ") == 1
    assert message in said[0]
    assert said[1] == ""
    assert not any((machine / "out").exists() for machine in machines)


def test_another_model_on_one_of_them_is_refused(machines):
    torch.manual_seed(5)
    own_files.tiny_encoder("bert", initializer_range=0.1, **STEADY).save_pretrained(
        machines[1] / "encoder"
    )
    words = VERBS["distill"]
    said = end(start(machines, words), 2, 2)
    assert "weights student.captured" in said[0]
    assert not any((machine / "out").exists() for machine in machines)


def test_data_that_one_of_them_lacks_end_both(machines):
    shutil.rmtree(machines[1] / "data")
    words = VERBS["finetune"]
    said = end(start(machines, words), 2, 2)
    assert said[0].count("error: process 1") == 1
    assert said[1] == ""
