"""The options of `kdcli try`."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.options import OF_OPTIONS, Option


@dataclass(frozen=True, config=OF_OPTIONS)
class TryOptions:
    """Options of `kdcli try`."""

    run: Annotated[str, Option("run", metavar="RUN", values="model")]
    """Run, export or model."""
    teacher: Annotated[str | None, Option("--teacher", metavar="MODEL", values="model")] = None
    """Model to compare it with (default: the run's teacher)."""
    port: Annotated[int, Option("--port", metavar="N"), Field(ge=0, le=65535)] = 8765
    """Port of the page; 0 for any that is free."""
    host: Annotated[str, Option("--host", metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on. With any other than the default, everybody who reaches the port can
    use the models."""


OPTIONS = {"try": TryOptions}
