"""The action for other repositories' CI, run as its steps are written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kdcli
from kdcli.data.labelled.partition import text_hashes
from kdcli.models.model import write_training_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEMO = Path(kdcli.__file__).parent / "data" / "demo_classifier"
ROWS = [f"the perki {word} stilan is brorpou ." for word in "abcdefghijklmnopqrstuvwxyz"]
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
    environment |= {"GITHUB_STEP_SUMMARY": str(summary), "PATH": path, "RUNNER_TEMP": str(folder)}
    command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=folder, env=environment, check=False)
    return done.returncode, summary.read_text("utf-8")


def compare_a_copy(folder: Path, **limits: str) -> tuple[int, str]:
    """Compare a copy of the demo with the demo, on the texts of `ROWS`."""
    if not (folder / "small").exists():
        shutil.copytree(DEMO, folder / "small")
    (folder / "rows.csv").write_text("\n".join(["text", *ROWS]) + "\n", "utf-8")
    models = {"model": "small", "reference": "demo-classifier", "data": "rows.csv"}
    return gate(folder, **models, **limits)


@pytest.mark.parametrize(
    ("limits", "code", "end"),
    [
        (
            {"min_metric": "agreement=0.9", "max_latency_ms": "60000", "max_mb": "3"},
            0,
            "All limits are met.",
        ),
        # The copy is not 1,000 times as fast, or too unstable to tell.
        ({"min_speedup": "1000", "max_mb": "1"}, 5, "; the weights take 2.05 MB, above 1 MB."),
    ],
)
def test_the_summary_lists_the_limits_and_what_was_missed(limits, code, end, tmp_path):
    ended, summary = compare_a_copy(tmp_path, **limits)
    assert ended == code
    assert "agreement |" in summary
    assert "1 × 128" in summary
    listed = [line for line in summary.partition("## Limits")[2].splitlines() if line[:1] == "*"]
    assert listed == [f"* {name.replace('_', '-')}: {limit}" for name, limit in limits.items()]
    assert summary.rstrip().endswith(end)


@pytest.mark.parametrize(
    ("trained", "limits", "code", "found"),
    [
        (6, {}, 0, ["* skipped 6 of 26 rows: small was trained on them", "All limits are met."]),
        # The failure of `evaluate` counts, and the summary also has the one of `benchmark`.
        (
            26,
            {"min_speedup": "1000"},
            2,
            [
                "Failed: cannot evaluate on 1 of 1 rows held out: small was trained on them; ",
                # A busy machine may show no speed-up at all.
                "; small on torch fp32: ",
            ],
        ),
    ],
)
def test_rows_that_trained_the_model_are_skipped_or_refused(trained, limits, code, found, tmp_path):
    shutil.copytree(DEMO, tmp_path / "small")
    write_training_rows(tmp_path / "small", text_hashes(ROWS[:trained]))
    ended, summary = compare_a_copy(tmp_path, min_metric="agreement=0.9", **limits)
    assert ended == code
    places = [summary.rfind(text) for text in found]
    assert places == sorted(places)
    assert -1 not in places
