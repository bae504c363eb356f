"""The options of `kdcli push`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import PRINTING, show, with_options


@app.command()
@with_options(*PRINTING)
def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A model or an export.")],
    repository: Annotated[
        str, typer.Argument(metavar="REPO", help="OWNER/NAME on the hub; made if it is not there.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public, not private.")
    ] = False,
    **shared: Any,
) -> Any:
    """Push a model directory or an export to the hub."""
    from kdcli.report.publish import publish

    return show(publish(directory, repository, private=not public), as_json=shared["json"])
