"""The options of `kdcli prune`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import (
    TRAINING,
    EvalTask,
    Pooling,
    Task,
    run_options,
    show,
    training_options,
    with_options,
)
from kdcli.recipe.methods import method_names

METHODS = ", ".join(method_names("kdcli.pruners", "pruner"))


@app.command()
@with_options(*TRAINING)
def prune(
    model: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=f"{METHODS}; repeatable.", show_default=False)
    ] = None,
    sparsity: Annotated[
        list[float] | None,
        typer.Option(help="Share of the weights to remove, e.g. 0.9; repeatable."),
    ] = None,
    masking: Annotated[
        str | None, typer.Option(help="local, global, proportional or threshold.")
    ] = None,
    task: Task = None,
    teacher: Annotated[
        str | None, typer.Option(help="A model fine-tuned on the task, to learn from too.")
    ] = None,
    eval_task: EvalTask = None,
    pooling: Pooling = None,
    **shared: Any,
) -> Any:
    """Remove weights of an encoder while it learns a task (SMP and its baselines)."""
    given = locals() | shared
    from kdcli.verbs.prune.recipes import prune_recipes
    from kdcli.verbs.prune.run import prune as train

    own: dict[str, Any] = {
        "model": model,
        "task": task,
        "sparsity": sparsity,
        "teacher": teacher,
        "pruner.masking": masking,
    }
    own |= {"eval.tasks": eval_task, "embedding.pooling": pooling}
    recipes = prune_recipes(
        method or [],
        recipe=shared["recipe"],
        sets=shared["sets"] or (),
        options=own | training_options(given),
    )
    return show(train(recipes, run_options(given)), as_json=shared["json"])
