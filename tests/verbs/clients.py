"""Programs that load exports and are no dependencies of kdcli: transformers.js and fastembed.

`.github/workflows/ci.yml` installs them and says where they are:

* NODE_PATH: a `node_modules` directory with @huggingface/transformers
* KDCLI_FASTEMBED: the Python interpreter of an environment with fastembed
* KDCLI_FOREIGN=1: a missing program is a failure; otherwise its tests are skipped
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Prints every argument of `console.log` as JSON, and never asks the hub.
PRELUDE = """import { env as settings } from "@huggingface/transformers";
settings.allowRemoteModels = false;
console.log = (...shown) => process.stdout.write(JSON.stringify(shown) + "\\n");
"""


def missing(message: str) -> None:
    if os.environ.get("KDCLI_FOREIGN") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def node():
    """`node(code, export, *arguments)` runs an ES module in an export's directory and returns the
    values that it prints."""
    modules = Path(os.environ.get("NODE_PATH", "")).absolute()
    if shutil.which("node") is None or not (modules / "@huggingface" / "transformers").is_dir():
        missing(
            "needs Node; npm install --ignore-scripts @huggingface/transformers; and NODE_PATH=, "
            "the node_modules directory"
        )

    def run(code: str, export: Path, *arguments: str) -> list[list[Any]]:
        beside = export.parent
        if not (beside / "node_modules").exists():
            # ES modules are not searched for in NODE_PATH.
            (beside / "node_modules").symlink_to(modules)
        script = beside / "script.mjs"
        script.write_text(PRELUDE + code, "utf-8")
        command = ["node", str(script), *arguments]
        done = subprocess.run(command, cwd=export, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="session")
def fastembed():
    """`fastembed(code, *arguments)` runs Python code with fastembed and returns the JSON that it
    prints."""
    python = os.environ.get("KDCLI_FASTEMBED")
    if python is None:
        missing("needs KDCLI_FASTEMBED=, a Python interpreter that has fastembed")

    def run(code: str, *arguments: str) -> Any:
        command = [python, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
