"""The command line: parse, resolve the recipe, one call, print. No logic; help imports nothing heavy."""

from kdcli.cli.app import app, main

__all__ = ["app", "main"]
