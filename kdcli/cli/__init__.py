"""The command line. `kdcli --help` imports no large library."""

import importlib
from pathlib import Path

from kdcli.cli.app import app, main

__all__ = ["app", "main"]

FIRST = (
    "compress",
    "distill",
    "prune",
    "cotrain",
    "trim",
    "adapt",
    "finetune",
    "tokenize",
    "evaluate",
    "benchmark",
    "export",
    "push",
)
"""The order of the verbs in help. The other verbs follow in alphabetical order."""

# Every folder of kdcli/verbs with a cli.py is a verb. Importing it adds it to the application.
_verbs = [path.parent.name for path in (Path(__file__).parents[1] / "verbs").glob("*/cli.py")]
for _verb in sorted(
    _verbs, key=lambda verb: (FIRST.index(verb) if verb in FIRST else len(FIRST), verb)
):
    importlib.import_module(f"kdcli.verbs.{_verb}.cli")
importlib.import_module("kdcli.cli.about")
