"""The action for other repositories' CI, run as its steps are written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kdcli

DEMO = Path(kdcli.__file__).parent / "data" / "demo_classifier"
ACTION = yaml.safe_load((Path(__file__).parents[1] / "action.yml").read_text("utf-8"))


def gate(folder: Path, **inputs: str) -> tuple[int, str]:
    """Run the comparing step; return its exit code and the summary."""
    defaults = {name: row.get("default", "") for name, row in ACTION["inputs"].items()}
    given = defaults | {name.replace("_", "-"): value for name, value in inputs.items()}
    step = ACTION["runs"]["steps"][-1]
    names = {key: value.split("inputs.")[1].split()[0] for key, value in step["env"].items()}
    summary = folder / "summary.md"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {key: given[name] for key, name in names.items()}
    environment |= {"GITHUB_STEP_SUMMARY": str(summary), "PATH": path}
    command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=folder, env=environment, check=False)
    return done.returncode, summary.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"min_metric": "agreement=0.9", "max_latency_ms": "60000", "max_mb": "3"}, 0),
        ({"max_mb": "1"}, 5),
    ],
)
def test_the_gate_fails_by_its_exit_code_and_writes_a_summary(limits, code, tmp_path):
    shutil.copytree(DEMO, tmp_path / "small")
    lines = [f"the perki {word} stilan is brorpou ." for word in "abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "rows.csv").write_text("text\n" + "\n".join(lines) + "\n", "utf-8")
    models = {"model": "small", "reference": "demo-classifier", "data": "rows.csv"}
    ended, summary = gate(tmp_path, **models, **limits)
    assert ended == code
    assert "agreement |" in summary
    assert "1 × 128" in summary
    assert ("The weights take 2.05 MB" in summary) == ("max_mb" in limits)
