"""The file for old machines as a process, and its results read back."""

import functools
import hashlib
import json
import operator
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import script

from kdcli.deploy.old_machines import measure_encoders
from kdcli.deploy.old_machines.portable import read_portable, write_portable
from kdcli.engine.device import known_devices
from kdcli.errors import MachineError, UsageError

pytestmark = pytest.mark.slow

SOURCES = ("measure_encoders.py", "shapes.json")
FAST = ["--device", "cpu", "--min-runs", "4", "--min-seconds", "0.01"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the file as a user does, in its folder, without kdcli on the path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "measure_encoders.py", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment
    )


def refused(folder: Path, *arguments: str) -> str:
    """The message of the file that refuses its arguments, and measures nothing."""
    process = script(folder / "measure_encoders.py", *arguments)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (2, "")
    return stderr


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The path of a result with two shapes in two cells."""
    folder = tmp_path_factory.mktemp("portable")
    write_portable(folder, ["2x32@4", "1x16:40@2"], [(1, 8), (3, 12)], vocab_size=50)
    done = run(folder, *FAST, "--padding", "random")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6
    return folder / "result.json"


def test_what_is_written(tmp_path):
    paths = write_portable(
        tmp_path / "new" / "folder", ["12x768", " 6x384 "], [(1, 128), (8, 128), (1, 128)]
    )
    assert paths == [tmp_path / "new" / "folder" / name for name in SOURCES]
    assert paths[0].read_bytes() == Path(measure_encoders.__file__).read_bytes()
    plan = json.loads(paths[1].read_text())
    assert plan["shapes"] == {
        "12x768": {"layers": 12, "hidden": 768, "ffn": 3072, "heads": 12},
        "6x384": {"layers": 6, "hidden": 384, "ffn": 1536, "heads": 12},
    }
    assert (plan["cells"], plan["vocab_size"]) == ([[1, 128], [8, 128]], 30522)
    assert plan["install"] == {row["capability"]: row["install"] for row in known_devices()}


def test_writing_again_is_fine_and_another_file_is_left_alone(tmp_path):
    paths = write_portable(tmp_path, ["6x384"], [(1, 128)])
    assert write_portable(tmp_path, ["6x384"], [(1, 128)]) == paths
    before = paths[1].read_bytes()
    with pytest.raises(UsageError, match=r"shapes\.json exists with other content"):
        write_portable(tmp_path, ["3x384"], [(1, 128)])
    assert paths[1].read_bytes() == before


def test_what_cannot_be_measured_is_refused_and_nothing_written(tmp_path):
    for shapes, batch_size, words in (
        ([], 1, 9),
        (["6x384"], 0, 9),
        (["6x384"], 1, 0),
        (["6y384"], 1, 9),
    ):
        with pytest.raises(UsageError):
            write_portable(tmp_path / "new", shapes, [(batch_size, 8)], words)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="file could not be written"):
        write_portable(tmp_path / "file", ["6x384"], [(1, 8)])


def test_there_and_back(result):
    found = read_portable(result)
    rows = found.rows
    names, cells = ("2x32@4", "1x16:40@2"), [(1, 8), (3, 12)]
    assert [(r.model, (r.batch_size, r.seq_len)) for r in rows] == [
        (name, cell) for cell in cells for name in names
    ]
    for row in rows:
        assert (row.backend, row.device, row.dtype, row.padding) == (
            "portable",
            "cpu",
            "fp32",
            "random",
        )
        assert row.n >= 4
        assert 0 < row.p50_ms <= row.p75_ms <= row.p90_ms <= row.p95_ms
    assert rows[0].n == rows[1].n, "runs are paired"
    assert [r.speedup and r.speedup.baseline for r in rows] == [None, "2x32@4"] * 2
    assert (found.shapes, found.failures, found.notes) == (list(names), [], [])
    sums = json.loads(result.read_text())["sha256"]
    assert sums == {
        p: hashlib.sha256((result.parent / p).read_bytes()).hexdigest() for p in SOURCES
    }
    environment = found.environment
    assert (environment["torch"][:2], len(environment["load_average"])) == ("2.", 3)
    assert environment["latency_threads"] >= 1
    assert environment["cpu"]


def test_an_unstable_cell_is_marked(result, tmp_path, capsys):
    raw = json.loads(result.read_text())
    steady, wild = [0.004] * 30, 6 * [0.001, 0.001, 0.002, 0.004, 0.004]
    ratio = measure_encoders.speedup(steady, wild) | {"baseline": "2x32@4"}
    raw["rows"] = raw["rows"][:2]
    raw["rows"][0] |= measure_encoders.summary(steady)
    raw["rows"][1] |= measure_encoders.summary(wild) | {"speedup": ratio}
    measure_encoders.show(raw["rows"])
    printed = capsys.readouterr().out
    assert "over 2x32@4: at least 1.00, unstable measurement" in printed
    assert "4.000 ms, 95 %" in printed.splitlines()[1]
    (tmp_path / "changed.json").write_text(json.dumps(raw))
    rows = read_portable(tmp_path / "changed.json").rows
    assert [row.status for row in rows] == ["ok", "unstable"]
    assert (rows[1].stated_ms, rows[1].speedup.stated) == (pytest.approx(4.0), 1.0)
    ratio["unstable"] = False
    (tmp_path / "changed.json").write_text(json.dumps(raw))
    with pytest.raises(UsageError, match="the times are unstable, but the speed-up is not"):
        read_portable(tmp_path / "changed.json")


def test_an_earlier_result_is_not_overwritten(result):
    before = result.read_bytes()
    assert "result.json exists" in refused(result.parent, *FAST)
    assert result.read_bytes() == before


def test_a_cell_that_did_not_fit_is_a_failure(result, tmp_path):
    raw = json.loads(result.read_text())
    times = ("p50_ms", "p75_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms", "iqr_over_p50")
    raw["rows"][1] |= dict.fromkeys(times) | {"n": 0, "status": "out of memory", "speedup": None}
    (tmp_path / "changed.json").write_text(json.dumps(raw))
    found = read_portable(tmp_path / "changed.json")
    assert [row.model for row in found.rows] == ["2x32@4", "2x32@4", "1x16:40@2"]
    (failure,) = found.failures
    assert (failure.model, failure.batch_size, failure.reason) == ("1x16:40@2", 1, "out of memory")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_the_finished_cells(tmp_path, sent):
    write_portable(tmp_path, ["1x16@2"], [(1, 4), (2, 4), (3, 4)], vocab_size=50)
    slowly = ["--device", "cpu", "--min-runs", "1", "--min-seconds", "1.5"]
    process = script(tmp_path / "measure_encoders.py", *slowly)
    assert "1x16@2" in process.first_line()
    process.kill(sent)
    _, said = process.communicate()
    assert (process.returncode, "interrupted; result.json holds the finished cells" in said) == (
        130,
        True,
    )
    found = read_portable(tmp_path / "result.json")
    assert [(row.batch_size, row.seq_len) for row in found.rows] == [(1, 4)]
    assert found.notes == [
        "result.json: the measurement was interrupted; only its finished cells are here"
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "measure_encoders.py",
        "result.json",
        "shapes.json",
    ]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, "shapes.json belongs next to this file"),
        ("{", "cannot be used: JSONDecodeError"),
        ({"schema": 1}, "has schema 1; this file reads 2"),
        ({"cells": []}, "at least one shape and one cell"),
        ({"cells": [[0, 8]]}, "every number must be a whole"),
        (
            {"shapes": {"a": {"layers": 1, "hidden": 10, "ffn": 4, "heads": 3}}},
            "heads must divide the hidden width",
        ),
        ({"shapes": {"a": {"layers": 1}}}, "cannot be used: TypeError"),
    ],
)
def test_a_plan_that_cannot_be_used_names_its_file(tmp_path, capsys, plan, said):
    write_portable(tmp_path, ["1x16@2"], [(1, 4)])
    path = tmp_path / "shapes.json"
    if plan is None:
        path.unlink()
    else:
        path.write_text(
            plan if isinstance(plan, str) else json.dumps(json.loads(path.read_text()) | plan)
        )
    with pytest.raises(SystemExit, match=r"^2$"):
        measure_encoders.read_plan(path)
    message = capsys.readouterr().err
    assert str(path) in message
    assert said in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--half", "--device", "cpu"], "--half needs a CUDA device"),
        (["--min-runs", "0"], "--min-runs must be at least 1"),
        (["--min-seconds", "nan"], "--min-seconds between 0"),
        (["--out", "missing/result.json"], "or its folder does not"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_measured(tmp_path, arguments, said):
    write_portable(tmp_path, ["1x16@2"], [(1, 4)])
    assert said in refused(tmp_path, *arguments)


def changed(result: Path, tmp_path: Path, *keys: str | int, value: object) -> Path:
    """A copy of a result with one value changed."""
    tree = json.loads(result.read_text())
    functools.reduce(operator.getitem, keys[:-1], tree)[keys[-1]] = value
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(tree))
    return path


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (["schema"], 1, "has schema 1; this kdcli reads 2"),
        (["kind"], "other", "is not a result of measure_encoders.py"),
        (
            ["rows", 0, "p50_ms"],
            -1.0,
            "'p50_ms' in item 1 of 'rows' must be greater than 0, got -1",
        ),
        (["rows", 0, "mean_ms"], float("nan"), "'mean_ms' in item 1 .* must be a finite number"),
        (["rows", 0, "n"], "4", "'n' in item 1 of 'rows' must be a whole number, got '4'"),
        (["rows", 0, "n"], 4.5, "'n' in item 1 of 'rows' must be a whole number, got 4.5"),
        (["rows", 0, "p50_ms"], float("inf"), "must be a finite number, got inf"),
        (["rows", 0, "iqr_over_p50"], float("nan"), "must be a finite number, got nan"),
        (["rows", 0, "iqr_over_p50"], -0.1, "must be at least 0"),
        (["rows", 1, "speedup", "median"], float("inf"), "must be a finite number"),
        (["rows", 0, "batch_size"], 0, "'batch_size' in item 1 of 'rows' must be greater than 0"),
        (["rows", 0, "seq_len"], -1, "'seq_len' in item 1 of 'rows' must be greater than 0"),
        (["rows", 0, "n"], -4, "'n' in item 1 of 'rows' must be at least 0"),
        (["rows", 0, "backend"], "onnx", "must be 'portable', got 'onnx'"),
        (["rows", 0, "dtype"], "int3", "must be 'fp32' or 'fp16', got 'int3'"),
        (["rows", 0, "padding"], "some", "must be 'full' or 'random', got 'some'"),
        (["rows", 0, "status"], "fast", "'fast' .* expected tags: 'ok', 'noisy', 'unstable', 'out"),
        (["rows", 0, "model"], "9x9", "a row names 9x9, which is not among the models"),
        (["rows", 0, "model"], "1x16:40@2", "a model has two rows in a cell"),
        (["rows", 0, "status"], "out of memory", "'n' in item 1 of 'rows' must be 0, got"),
        (["rows", 0, "more"], 1, "'more' in item 1 of 'rows' is unknown"),
        (["rows", 1, "speedup", "baseline"], "9x9", "a row names 9x9"),
    ],
)
def test_a_damaged_or_foreign_result_names_its_file(result, tmp_path, keys, value, said):
    path = changed(result, tmp_path, *keys, value=value)
    with pytest.raises(UsageError, match=said) as caught:
        read_portable(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"schema": 2}'])
def test_what_is_no_result_at_all(tmp_path, content):
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"some\.json"):
        read_portable(path)


def test_a_result_of_another_version_of_the_file_is_noted(result, tmp_path):
    path = changed(result, tmp_path, "sha256", "measure_encoders.py", value="0" * 64)
    note = "changed.json was measured by another version of measure_encoders.py than this kdcli has"
    assert read_portable(path).notes == [note]


def test_a_cell_that_did_not_fit_has_no_times(result, tmp_path):
    row = json.loads(result.read_text())["rows"][0]
    row |= {"n": 0, "status": "out of memory"}
    path = changed(result, tmp_path, "rows", 0, value=row)
    with pytest.raises(UsageError, match="'p50_ms' in item 1 of 'rows' must be null, got"):
        read_portable(path)
