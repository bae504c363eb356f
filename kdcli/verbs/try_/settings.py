"""The options of `kdcli try`."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.options import Option


@dataclass(frozen=True)
class TryOptions:
    """Options of `kdcli try`."""

    run: Annotated[
        str,
        Option("run", metavar="RUN", values="model"),
        Field(description="Run, export or model."),
    ]
    teacher: Annotated[
        str | None,
        Option("--teacher", metavar="MODEL", values="model"),
        Field(description="Model to compare it with (default: the run's teacher)."),
    ] = None
    port: Annotated[
        int,
        Option("--port", metavar="N"),
        Field(ge=0, le=65535, description="Port of the page; 0 for any that is free."),
    ] = 8765
    host: Annotated[
        str,
        Option("--host", metavar="ADDRESS"),
        Field(
            description="Address to listen on. With any other than the default, everybody who "
            "reaches the port can use the models."
        ),
    ] = "127.0.0.1"


OPTIONS = {"try": TryOptions}
