"""The search for faults finds one that is planted: every way to fail is seen, kept, and not run
again."""

import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kdcli.report.schema_decisions import Confusion

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))


from tools.faults import campaign as campaigns  # noqa: E402
from tools.faults.campaign import Campaign, Case, Fault, Kind  # noqa: E402
from tools.faults.files import read  # noqa: E402
from tools.faults.kills import differences, state  # noqa: E402
from tools.faults.models import _auto_map, _pickle  # noqa: E402
from tools.faults.mutations import SHARES, draw, problems  # noqa: E402
from tools.faults.process import Done  # noqa: E402
from tools.faults.written import FILES, spoil  # noqa: E402


def _planted(case: Case) -> None:
    if case.number == 1:
        raise Fault("wrong")
    if case.number == 2:
        raise KeyError("no message")
    if case.number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if case.number == 4:
        time.sleep(60)
    if case.number == 5:
        bytearray(b"x") * (400 << 20)
    (case.folder / "left").write_text("of this case alone")


def _campaign(tmp_path: Path, *kinds: Kind) -> Campaign:
    return Campaign(kinds, 0, tmp_path, tmp_path / "results.jsonl")


def test_every_planted_fault_is_found_and_the_cases_after_it_run(tmp_path, monkeypatch):
    monkeypatch.setattr(campaigns, "MAX_MEGABYTES", 200)
    kind = Kind("planted", 8, _planted, chunk=3, wall=6)
    campaign = _campaign(tmp_path, kind)
    campaign.run(minutes=1, jobs=2)
    found = {name: seen for alike in campaign.failures() for name, seen in alike}
    assert set(found) == {f"planted:{n}" for n in (1, 2, 3, 4, 5)}
    assert found["planted:1"] == "wrong"
    assert found["planted:2"].startswith("KeyError: 'no message' (tools/")
    assert found["planted:3"].startswith("ended with status 9")
    assert found["planted:4"].startswith("no answer in")
    assert found["planted:5"].endswith(" MB")
    assert campaign.table().splitlines()[1].split()[:5] == ["planted", "8", "8", "3", "5"]


def test_a_second_start_goes_on_where_the_first_stopped(tmp_path):
    ran = tmp_path / "ran"

    def noted(case: Case) -> None:
        with ran.open("a") as file:
            file.write(f"{case.number} {case.rng.random()}\n")

    _campaign(tmp_path, Kind("noted", 3, noted)).run(minutes=1, jobs=1)
    _campaign(tmp_path, Kind("noted", 5, noted)).run(minutes=1, jobs=1)
    before = ran.read_text().splitlines()
    assert sorted(line.split()[0] for line in before) == list("01234")
    (tmp_path / "results.jsonl").unlink()
    _campaign(tmp_path, Kind("noted", 5, noted)).run(minutes=1, jobs=1)
    assert sorted(ran.read_text().splitlines()[5:]) == sorted(before)


@pytest.mark.parametrize(
    "done",
    [
        Done(1, "", "error: a bug\n", 0, 0),
        Done(-9, "", "", 0, 0),
        Done(2, "", "Traceback (most recent call last):\nKeyError: 1\n", 0, 0),
        Done(2, "", "", 0, 0),
        Done(2, "", "error: one\nerror: two\n", 0, 0),
        Done(2, "", "error: " + "x" * 100_000, 0, 0),
        Done(2, "", "error: slow\n", 9.0, 0),
        Done(0, "", "", 1.0, 3000),
    ],
)
def test_how_a_command_may_not_end(done):
    with pytest.raises(Fault):
        done.check()
    Done(2, "", "error: one\nwhat to do\n", 0.1, 300).check(2)


def test_planted_code_leaves_a_trace_where_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS_MARKER", str(tmp_path / "marker"))
    for plant in (_pickle, _auto_map):
        plant(random.Random(0), tmp_path)
    torch.load(tmp_path / "model.pt", weights_only=False)
    assert (tmp_path / "marker").read_text() == "pickle"
    runpy.run_path(str(tmp_path / "planted.py"), run_name="planted")
    assert (tmp_path / "marker").read_text() == "planted"


def test_what_a_run_left_is_compared_file_by_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"1")
    (tmp_path / "a" / "log.jsonl").write_text('{"step": 1, "seconds": 2.0}\n')
    wanted = state(tmp_path)
    (tmp_path / "a" / "log.jsonl").write_text('{"step": 1, "seconds": 3.0}\n')
    assert differences(state(tmp_path), wanted) == []
    (tmp_path / "a" / "model.safetensors").write_bytes(b"2")
    (tmp_path / "a" / ".lock").touch()
    assert differences(state(tmp_path), wanted) == [
        "a/.lock is left over",
        "a/model.safetensors differs",
    ]


def test_changes_are_as_many_as_asked_for():
    drawn = draw(60, seed=0)
    assert drawn == draw(60, seed=0)
    assert (len(drawn), {m.share for m in drawn}) == (60, set(SHARES))


def test_every_change_can_be_made():
    assert problems() == []


@pytest.mark.parametrize("number", range(8))
def test_damaged_files_of_kdcli_are_refused_with_words(number, tmp_path):
    """The files that need no finished run; `make faults` damages the others too."""
    name = ("training rows", "partition", "journal", "inputs")[number % 4]
    one = FILES[name]
    one.write(tmp_path, tmp_path)
    read(name, lambda: one.read(tmp_path), is_valid=True)
    spoil(random.Random(number), tmp_path / one.file)
    read(name, lambda: one.read(tmp_path))


@pytest.mark.parametrize("damage", ["text", "long", "many"])
def test_a_confusion_matrix_that_does_not_fit_its_labels_is_damaged(damage):
    counts = {"text": [["1"]], "long": [[2**63]], "many": [[1, 2]]}[damage]
    Confusion(labels=["a"], counts=[[1]])
    with pytest.raises(ValidationError):
        Confusion(labels=["a"], counts=counts)
