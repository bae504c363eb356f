"""The options of `kdcli tokenize`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import PRINTING, show, with_options


@app.command()
@with_options("output_dir", "dry_run", "trust_remote_code", *PRINTING)
def tokenize(
    source: Annotated[
        str,
        typer.Argument(help="Hub id, file, directory, URL (hf://, s3://, https://), or 'demo'."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="The model that will read it: hub id, directory, or 'demo'."
        ),
    ],
    column: Annotated[
        str | None, typer.Option(help="Of the text; default `text`, or the only one of strings.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default one a core.")] = None,
    **shared: Any,
) -> Any:
    """Tokenise a large text once, in several processes: training then takes the directory as --data."""
    given = locals() | shared
    from kdcli.verbs.tokenize.run import run

    names = (
        "source",
        "tokenizer",
        "column",
        "workers",
        "output_dir",
        "dry_run",
        "trust_remote_code",
    )
    return show(run(**{name: given[name] for name in names}), as_json=shared["json"])
