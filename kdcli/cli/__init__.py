"""The command line: parse, resolve the recipe, one call, print. No logic; nothing heavy is imported to show help.

Importing a module of verbs adds them to the application, in the order in which help lists them.
"""

from __future__ import annotations

# isort: off
from kdcli.cli import compress, score, masks, about  # noqa: F401

# isort: on
from kdcli.cli.app import app


def main() -> None:
    """Entry point of `kdcli` and `python -m kdcli`."""
    app()
