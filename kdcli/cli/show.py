"""Print the result of a verb."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import typer


class Printable(Protocol):
    """The result of a verb, such as a report or an estimate."""

    def to_json(self) -> str:
        """Return the result as JSON, for `--json`."""
        ...

    def renderables(self) -> Iterable[object]:
        """Yield the parts that rich prints to a terminal."""
        ...


@runtime_checkable
class Saved(Protocol):
    """A result with a directory, which `--push-to-hub` pushes."""

    @property
    def folder(self) -> Path:
        """The directory."""
        ...


ResultT = TypeVar("ResultT", bound=Printable | None)


def show(result: ResultT, *, as_json: bool | None) -> ResultT:
    """Print a result as JSON or for a terminal, and return it.

    Args:
        result: The result; None in a process that prints nothing.
        as_json: Whether to print JSON. None prints nothing, for calls from Python.
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
