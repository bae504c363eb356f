"""The options of `kdcli trim`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import MAKING, run_options, show, with_options


@app.command()
@with_options("sets", "data", "device", *MAKING)
def trim(
    model: Annotated[
        str, typer.Argument(help="Hub id, directory, or 'demo'; its head goes with it.")
    ],
    vocab_size: Annotated[
        int | None, typer.Option(help="Keep so many tokens; default: all that --data need.")
    ] = None,
    **shared: Any,
) -> Any:
    """Remove the tokens that your text does not need from a model's vocabulary."""
    given = locals() | shared
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.trim.settings import TrimRecipe

    options = {"model": model, "vocab_size": vocab_size, "data.source": shared["data"]}
    resolved = resolve(TrimRecipe, recipe=None, sets=shared["sets"] or (), options=options)
    from kdcli.verbs.trim.run import run

    return show(run(resolved, run_options(given)), as_json=shared["json"])
