"""The options of `kdcli finetune`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import (
    TRAINING,
    Metric,
    Task,
    run_options,
    show,
    training_options,
    with_options,
)
from kdcli.errors import UsageError


@app.command()
@with_options(*TRAINING)
def finetune(
    model: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    task: Task = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of every setting, each with its own seed.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...", help="Try every value, e.g. lr=2e-5,3e-5; may be repeated."
        ),
    ] = None,
    metric: Metric = None,
    **shared: Any,
) -> Any:
    """Fine-tune an encoder on a labelled task and report what it scores."""
    given = locals() | shared
    from kdcli.recipe.resolve import grid_options, verb_of
    from kdcli.verbs.finetune.run import finetune as train
    from kdcli.workloads.recipes import finetune_recipe
    from kdcli.workloads.settings import FinetuneRecipe

    if task == "rerank" or (shared["recipe"] is not None and verb_of(shared["recipe"]) == "rerank"):
        return _finetune_reranker(given)
    own = {
        "model": model,
        "task": task,
        "seeds": seeds,
        "metrics": metric,
        **grid_options(FinetuneRecipe, grid or ()),
    }
    options = own | training_options(given)
    resolved = finetune_recipe(recipe=shared["recipe"], sets=shared["sets"] or (), options=options)
    return show(train(resolved, run_options(given)), as_json=shared["json"])


def _finetune_reranker(given: Mapping[str, Any]) -> Any:
    for name in ("seeds", "grid", "metric"):
        if given[name]:
            raise UsageError(
                f"--{name} does not go with --task rerank", "start one run for each setting"
            )
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.finetune.run import finetune_reranker
    from kdcli.workloads.settings import RerankRecipe

    own = {"student.source": given["model"]} | training_options(given)
    resolved = resolve(RerankRecipe, recipe=given["recipe"], sets=given["sets"] or (), options=own)
    return show(finetune_reranker(resolved, run_options(given)), as_json=given["json"])
