"""Printing the result of a verb."""

from typing import Any

import typer


def show(result: Any, *, as_json: bool | None) -> Any:
    """Print a result as JSON or for a terminal, and return it.

    Args:
        result: None in a process that prints nothing.
        as_json: None prints nothing, as from Python.
    """
    if result is None or as_json is None:
        return result
    if as_json:
        typer.echo(result.to_json())
        return result
    from rich.console import Console

    console = Console()
    for part in result.renderables():
        console.print(part)
    return result
