"""Print kdcli/__init__.pyi: the signatures of the verbs, for editors and type checkers.

python -m tools.stub > kdcli/__init__.pyi
"""

import inspect
import subprocess
import sys

import kdcli
from kdcli.cli.python import function, read, signature

HEAD = '''"""Written by `python -m tools.stub`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from transformers import PreTrainedTokenizerBase

from kdcli.data.objects import Data, Model
from kdcli.deploy.usable import load as load
from kdcli.report.finish import RunResult
from kdcli.report.publish import Published, Upload
from kdcli.verbs.compress.compress_candidates import Front
from kdcli.verbs.export.run import Exported

__version__: str
VERBS: tuple[str, ...]
'''
# The stub does not import it, because the command line imports `kdcli`.
READ = f'''
def read(folder: Path | str) -> RunResult:
    """{(read.__doc__ or "").rstrip()}"""
'''
RESULTS = {"export": "Exported"}
OVERLOADS = {
    "compress": (("Front", "front: Path | str"), ("RunResult", "front: None = None")),
    "push": (
        ("Upload", "dry_run: Literal[True]"),
        ("Published", "dry_run: Literal[False] = False"),
    ),
}
"""Verb -> its results, each with the value of an option that gives it."""
MODULES = ("collections.abc.", "pathlib.", "_local.", "typing.")


def stub() -> str:
    """Return the content of the file, formatted by ruff."""
    text = "\n".join([HEAD, READ, *map(definitions, kdcli.VERBS)])
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "kdcli/__init__.pyi"]
    done = subprocess.run([*command, "-"], input=text, capture_output=True, text=True, check=True)
    return done.stdout


def definitions(verb: str) -> str:
    """Return the definition of a verb's function, once for each type of its result."""
    if verb not in OVERLOADS:
        return definition(verb, RESULTS.get(verb, "RunResult"))
    return "\n".join(f"@overload\n{definition(verb, *each)}" for each in OVERLOADS[verb])


def definition(verb: str, result: str, given: str = "") -> str:
    """Return a definition of a verb's function, with its docstring.

    Args:
        verb: The verb.
        result: The type of its result.
        given: The declaration that replaces the one of a parameter; empty for none.
    """
    parameters: list[str] = []
    is_keyword_only = False
    for each in signature(verb).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not is_keyword_only:
            parameters, is_keyword_only = [*parameters, "*"], True
        kind = each.annotation
        if not isinstance(kind, str):
            kind = inspect.formatannotation(kind)
        for module in MODULES:
            kind = kind.replace(module, "")
        default = "" if each.default is each.empty else f" = {each.default!r}"
        declared = f"{each.name}: {kind}{default}"
        parameters.append(given if given.startswith(f"{each.name}:") else declared)
    docstring = "\n    ".join((function(verb).__doc__ or "").splitlines())
    return f'def {verb}({", ".join(parameters)}) -> {result}:\n    """{docstring}"""\n'


if __name__ == "__main__":
    sys.stdout.write(stub())
