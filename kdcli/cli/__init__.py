"""The command line: parse, resolve the recipe, one call, print. No logic; nothing heavy is imported to show help."""

from __future__ import annotations

import importlib
from pathlib import Path

from kdcli.cli.app import app

FIRST = ("distill", "prune", "cotrain", "finetune", "evaluate", "benchmark", "export", "mask")
"""The order of the verbs in help; a verb that is not named here follows."""


def _verbs() -> list[str]:
    """Folders of `kdcli/commands` with a `cli.py`: one a verb."""
    found = [path.parent.name for path in (Path(__file__).parents[1] / "commands").glob("*/cli.py")]
    return sorted(found, key=lambda verb: (FIRST.index(verb) if verb in FIRST else len(FIRST), verb))


for _verb in _verbs():
    importlib.import_module(f"kdcli.commands.{_verb}.cli")
importlib.import_module("kdcli.cli.about")


def main() -> None:
    """Entry point of `kdcli` and `python -m kdcli`."""
    app()
