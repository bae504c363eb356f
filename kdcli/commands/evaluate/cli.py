"""The options of `kdcli evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import (
    JUDGING,
    Task,
    invocation_of,
    show,
    with_options,
)


@app.command()
@with_options(*JUDGING, "dtype", "processes")
def evaluate(
    models: Annotated[list[str] | None, typer.Argument(help="Fine-tuned models; the first is the baseline.")] = None,
    task: Task = None,
    mask_file: Annotated[
        list[str] | None, typer.Option("--mask", metavar="FILE", help="Judge MODEL under this mask; may be repeated.")
    ] = None,
    predictions: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every prediction as jsonl.")] = None,
    submission: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the GLUE server's file for the test split.")
    ] = None,
    min_metric: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=VALUE", help="Exit 5 below this; may be repeated.")
    ] = None,
    **shared: Any,
) -> None:
    """Judge fine-tuned models on a labelled task and compare them."""
    given = locals() | shared
    from kdcli.commands.evaluate.settings import EvaluateRecipe
    from kdcli.recipe.resolve import gates, resolve

    options = {
        "models": models,
        "masks": mask_file,
        "task": task,
        "data.source": shared["data"],
        "dtype": shared["dtype"],
    }
    resolved = resolve(EvaluateRecipe, recipe=shared["recipe"], sets=shared["sets"] or (), options=options)
    least = gates(min_metric or ())
    invocation = invocation_of(given)
    from kdcli.commands.evaluate import run as command

    extras = command.Extras(predictions=predictions, submission=submission, gates=least)
    result = command.run(resolved, invocation, extras)
    show(result, as_json=shared["json"])
    if result is not None:
        command.hold_gates(result, extras)
