"""`tools/gpu.py` on a CPU and small shapes: what it measures, keeps, leaves for the next call and
refuses."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from tools import gpu  # noqa: E402


@pytest.fixture
def main(tmp_path):
    """Runs the command in this process, which starts one for each piece."""

    def call(*arguments):
        return gpu.main([*arguments, "--tiny", "--out", str(tmp_path / "gpu")])

    return call


def test_pieces_are_measured_once_into_json_and_a_table(main, tmp_path, capsys):
    names = ["relation-128", "distil-1-fp32", "two-students", "cuda-graph"]
    arguments = "--device", "cpu", "--only", ",".join(names)
    command = [
        sys.executable,
        "-m",
        "tools.gpu",
        *arguments,
        "--tiny",
        "--out",
        str(tmp_path / "gpu"),
    ]
    environment = os.environ | {"OUT": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    written = (tmp_path / "gpu" / "cpu-tiny.json").read_text("utf-8")
    found = json.loads(written)
    assert list(found) == ["machine", *names]
    assert all(piece["rows"] and piece["error"] is None for piece in found.values())
    ((what, speed),) = found["distil-1-fp32"]["rows"]
    assert what.startswith("2x64 to 2x32, fp32, batch 2")
    assert float(speed.split(" tokens/s")[0].replace(",", "")) > 0
    heading, _, *table = (tmp_path / "gpu" / "cpu-tiny.md").read_text("utf-8").splitlines()
    assert f"torch {torch.__version__}" in heading
    assert {line.count("|") for line in table} == {4}
    assert {line.split("|")[1].strip() for line in table[2:]} == set(names)
    assert (tmp_path / "cpu-tiny.json").read_text("utf-8") == written
    assert main(*arguments) == 0
    assert capsys.readouterr().out.endswith("left for the next call: nothing\n")
    assert (tmp_path / "gpu" / "cpu-tiny.json").read_text("utf-8") == written


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_machine_without_a_gpu_is_told_so_and_nothing_is_recorded(main, tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*no CUDA device here"):
        main()
    assert not list(tmp_path.rglob("*.json"))


@pytest.fixture
def recorded(tmp_path):
    """Runs pieces by name, as `machine` and others do."""
    pieces = gpu.PIECES | {
        "fails": lambda bench: [][0],
        "dies": lambda bench: os.kill(os.getpid(), 9),
        "waits": lambda bench: time.sleep(600),
        "works": lambda bench: [("this", "1 | 2")],
    }
    bench = gpu.Bench(torch.device("cpu"), True, tmp_path)

    def run(*names, minutes=1.0):
        record = gpu.Record(tmp_path, "here")
        asked = {name: pieces[name] for name in ("machine", *names)}
        left = gpu.run(asked, record, bench, minutes)
        return left, gpu.Record(tmp_path, "here")

    return run


def test_a_piece_that_fails_is_recorded_and_the_others_go_on(recorded):
    left, record = recorded("fails", "dies", "works")
    assert left == []
    assert record.pieces["fails"].error == "IndexError: list index out of range"
    assert record.pieces["dies"].error == "exit code -9"
    assert "| works | this | 1 / 2 |" in record.table()
    assert "| fails | failed | IndexError: list index out of range |" in record.table()
