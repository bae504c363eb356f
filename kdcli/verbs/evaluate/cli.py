"""The options of `kdcli evaluate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import JUDGING, Metric, Pooling, Task, run_options, show, with_options


@app.command()
@with_options(*JUDGING, "dtype", "processes")
def evaluate(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Fine-tuned or embedding models; the first is the baseline."),
    ] = None,
    task: Task = None,
    mask_file: Annotated[
        list[str] | None,
        typer.Option("--mask", metavar="FILE", help="Evaluate MODEL under this mask; repeatable."),
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every prediction as jsonl.")
    ] = None,
    submission: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the GLUE server's file for the test split."),
    ] = None,
    min_metric: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="Exit 5 below this; may be repeated."),
    ] = None,
    metric: Metric = None,
    pooling: Pooling = None,
    **shared: Any,
) -> Any:
    """Evaluate fine-tuned models on a labelled task, or embedding models by their vectors, and compare them."""
    given = locals() | shared
    from kdcli.recipe.resolve import gates, resolve
    from kdcli.verbs.evaluate.settings import EvaluateRecipe

    options = {
        "models": models,
        "masks": mask_file,
        "task": task,
        "data.source": shared["data"],
        "metrics": metric,
    }
    options |= {"dtype": shared["dtype"], "pooling": pooling}
    resolved = resolve(
        EvaluateRecipe, recipe=shared["recipe"], sets=shared["sets"] or (), options=options
    )
    # After the recipe is checked, because this import takes seconds.
    from kdcli.verbs.evaluate.run import Extras, check_gates
    from kdcli.verbs.evaluate.run import evaluate as score

    extras = Extras(predictions=predictions, submission=submission, gates=gates(min_metric or ()))
    result = score(resolved, run_options(given), extras)
    show(result, as_json=shared["json"])
    if result is not None:
        check_gates(result, extras)
    return result
