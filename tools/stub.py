"""Prints kdcli/__init__.pyi: the signatures of the verbs, for editors and type checkers.

python -m tools.stub > kdcli/__init__.pyi
"""

import inspect
import subprocess
import sys

import kdcli
from kdcli.cli.python import function, signature

HEAD = '''"""Written by `python -m tools.stub`."""

from pathlib import Path

from kdcli.deploy.sparse.load import load as load
from kdcli.report.finish import RunResult
from kdcli.report.publish import Published
from kdcli.verbs.export.run import Exported

__version__: str
VERBS: tuple[str, ...]
'''
RESULTS = {"export": "Exported", "push": "Published"}


def stub() -> str:
    """The file, formatted."""
    parts = [HEAD]
    for verb in kdcli.VERBS:
        listed, by_name = [], False
        for one in signature(verb).parameters.values():
            if one.kind is one.KEYWORD_ONLY and not by_name:
                listed, by_name = [*listed, "*"], True
            default = "" if one.default is one.empty else f" = {one.default!r}"
            kind = (
                inspect.formatannotation(one.annotation)
                .replace("pathlib.", "")
                .replace("_local.", "")
            )
            listed.append(f"{one.name}: {kind}{default}")
        doc = function(verb).__doc__ or ""
        parts.append(
            f'def {verb}({", ".join(listed)}) -> {RESULTS.get(verb, "RunResult")}:\n    """{doc}"""\n'
        )
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--stdin-filename",
        "kdcli/__init__.pyi",
        "-",
    ]
    return subprocess.run(
        command, input="\n".join(parts), capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    sys.stdout.write(stub())
