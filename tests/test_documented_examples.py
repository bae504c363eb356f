"""The examples of the pages for developers run as they are written: files go where the page says,
inside a copy of the repository, and every Python and shell block runs there."""

import ast
import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import blocks, run_pages
from forked import workers_are_forked

import kdcli

pytestmark = pytest.mark.slow

ROOT = Path(kdcli.__file__).parents[1]
COPIED = ("kdcli", "recipes", "tests", "docs", "Makefile", "pyproject.toml", "constraints.txt")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A copy of the repository in which one process ran both pages, and what it printed."""
    copy = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "tests/documented.py"]
    pages = ["docs/add-a-method.md", "docs/add-a-model-type.md"]
    env = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(
        [*command, *pages], cwd=copy, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return copy, done.stdout


def report_in(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text("utf-8"))


def test_the_documented_loss_trains_a_student(ran):
    copy, _ = ran
    lines = (copy / "runs" / "last-hidden" / "log.jsonl").read_text("utf-8").splitlines()
    held_out = [row["held_out"]["hidden"] for row in map(json.loads, lines) if "held_out" in row]
    assert held_out[-1] < held_out[0]
    assert report_in(copy / "runs" / "last-hidden")["recipe"]["method"] == "last-hidden"


def test_the_documented_pruner_removes_half_of_the_weights(ran):
    copy, _ = ran
    (pruning,) = report_in(copy / "runs" / "random")["pruning"]
    assert pruning["density"] == pytest.approx(0.5, abs=0.001)


def test_a_model_of_the_documented_type_passes_the_contract_and_is_distilled(ran):
    copy, printed = ran
    config = json.loads((copy / "runs" / "gte" / "config.json").read_text("utf-8"))
    assert (config["model_type"], config["num_hidden_layers"]) == ("gte", 1)
    assert (copy / "runs" / "gte" / "model.safetensors").is_file()
    (passed,) = re.findall(r"^(\d+) passed", printed, re.MULTILINE)
    assert int(passed) >= 8


def test_the_documented_verb_and_recipe_are_found(ran):
    _, printed = ran
    assert re.search(r"^kdcli size demo\n\n(\d{6,})$", printed, re.MULTILINE)
    assert "imdb" in printed.split("kdcli recipes validate")[1].splitlines()[2]


def test_the_page_about_python_runs(tmp_path, monkeypatch, demo_examples):
    demo_examples(200)
    workers_are_forked(monkeypatch)
    with contextlib.chdir(tmp_path):
        run_pages([ROOT / "docs" / "python.md"])
    assert (tmp_path / "runs" / "shipped" / "onnx" / "model_quantized.onnx").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_import_of_the_package_exists(page):
    code = [content for _, language, content in blocks(page) if language == "python"]
    for statement in ast.walk(ast.parse("\n".join(code))):
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("kdcli"):
            module = importlib.import_module(str(statement.module))
            assert [n.name for n in statement.names if not hasattr(module, n.name)] == []
