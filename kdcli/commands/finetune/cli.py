"""The options of `kdcli finetune`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import TRAINING, Metric, Task, invocation_of, show, training_options, with_options


@app.command()
@with_options(*TRAINING)
def finetune(
    model: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    task: Task = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of every setting, each with its own seed.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,...", help="Try every value, e.g. lr=2e-5,3e-5; may be repeated."),
    ] = None,
    metric: Metric = None,
    **shared: Any,
) -> None:
    """Fine-tune an encoder on a labelled task and report what it scores."""
    given = locals() | shared
    from kdcli.commands.finetune.run import run
    from kdcli.downstream.recipes import finetune_recipe
    from kdcli.downstream.settings import FinetuneRecipe
    from kdcli.recipe.resolve import grid_options

    own = {"model": model, "task": task, "seeds": seeds, "metrics": metric, **grid_options(FinetuneRecipe, grid or ())}
    options = own | training_options(given)
    resolved = finetune_recipe(recipe=shared["recipe"], sets=shared["sets"] or (), options=options)
    show(run(resolved, invocation_of(given)), as_json=shared["json"])
