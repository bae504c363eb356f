"""A run directory names nothing of the machine that made it, and its parts find each other wherever
it lies."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
from own_files import interrupted, kdcli, log_of, said_by, same_weights, succeeds

QUICK = shlex.split(
    "--max-steps 4 --batch-size 8 --lr 1e-3 --dtype fp32 --set train.eval_every=4 "
    "--set data.max_length=24 --set train.checkpoint_every=2 "
    "--set measure.latency=false"
)
TEXT = {".json", ".jsonl", ".yaml", ".md", ".html", ".csv"}


def machine_paths(folder: Path, place: Path) -> list[str]:
    """Files that hold a path of this machine."""
    files = (p for p in folder.rglob("*") if p.suffix in TEXT)
    return [p.relative_to(folder).as_posix() for p in files if str(place) in p.read_text("utf-8")]


@pytest.fixture
def place(teacher_of, tmp_path, monkeypatch):
    """The working directory, with the teacher and its data under relative names."""
    made = teacher_of("class").parent
    for name in ("teacher", "data"):
        shutil.copytree(made / name, tmp_path / "here" / name)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture(params=["on a task", "cotrain"])
def asked(request, place, text_file):
    """Each with stages that read what an earlier one of the same run made; the stage, and the
    command."""
    shutil.copy(text_file, "text.txt")
    text = shlex.split(
        "--data text.txt --set data.held_out_blocks=8 --set eval.source=data --eval-task own"
    )
    text += shlex.split(
        "--set eval.overrides.data.max_length=16 --set eval.overrides.train.max_steps=4"
    )
    on_task = ["--task", "own", "--data", "data", "--set", "intermediate.lr=1e-3"]
    return {
        "on a task": (
            "student-undistilled",
            ["distill", "teacher", "--to", "2x16", *QUICK, *on_task],
        ),
        "cotrain": (
            "downstream/own/student",
            ["cotrain", "2x16:32@2", "1x16:32@2", "--base", "teacher", *QUICK, *text],
        ),
    }[request.param]


def test_a_stage_of_a_moved_run_is_repeated_from_anywhere(asked, place):
    (stage, command), out = asked, place / "out"
    # The report repeats the command as it was typed.
    succeeds(*command, "-o", os.path.relpath(out))
    assert machine_paths(out, place) == []
    moved = place / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(out, moved)
    recipe = moved / stage / "recipe.yaml"
    assert "model: ../" in recipe.read_text("utf-8")
    again = ["--recipe", recipe, "--dtype", "fp32", "--set", "measure.latency=false"]
    succeeds("finetune", *again, "-o", place / "again")
    assert log_of(place / "again")[-1] == log_of(moved / stage)[-1]


def test_resuming_from_another_working_directory(place, monkeypatch):
    teacher, data = place / "here" / "teacher", place / "here" / "data"
    command = ["distill", teacher, "--task", "own", "--data", data, "--to", "2x16", *QUICK]
    command += ["--set", "intermediate.lr=1e-3"]
    succeeds(*command, "-o", "whole")
    result = interrupted(monkeypatch, "student-undistilled", 0, *command, "-o", "out")
    assert result.exit_code == 130, result.output
    (place / "there").mkdir()
    monkeypatch.chdir(place / "there")
    succeeds(*command, "-o", "../here/out", "--resume")
    assert same_weights(place / "here" / "out", place / "here" / "whole")


def test_a_relative_input_of_another_working_directory_is_asked_for(place, monkeypatch):
    command = ["finetune", "teacher", "--task", "own", "--data", "data", *QUICK]
    assert interrupted(monkeypatch, "out", 1, *command, "-o", "out").exit_code == 130
    monkeypatch.chdir(place)
    command[1], command[5] = "here/teacher", "here/data"
    result = kdcli(*command, "-o", "here/out", "--resume")
    assert result.exit_code == 2
    assert 'model: was "teacher", is "here/teacher"' in result.stderr
    assert "relative paths from the same working directory" in said_by(result)
