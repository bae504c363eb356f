"""The options of `kdcli cotrain`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import (
    TRAINING,
    EvalTask,
    Task,
    run_options,
    show,
    training_options,
    with_options,
)
from kdcli.errors import UsageError


@app.command()
@with_options(*(name for name in TRAINING if name != "push_to_hub"))  # It makes two models
def cotrain(
    teacher: Annotated[str | None, typer.Argument(help="LxH, hub id or directory.")] = None,
    student: Annotated[str | None, typer.Argument(help="LxH, hub id or directory.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="co-distillation, one-way, reversed or standalone.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="A:B:C:D",
            help="Student against labels, from teacher; teacher against labels, from student.",
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of both softmaxes.")] = None,
    community: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A frozen teacher of both, from which shapes are copied."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Tokenizer and configuration of shapes; on a task weights too."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of a tokenizer trained from the text.")
    ] = None,
    standalone: Annotated[
        bool | None,
        typer.Option(
            "--standalone/--no-standalone", help="Also train both without each other, to compare."
        ),
    ] = None,
    task: Task = None,
    eval_task: EvalTask = None,
    **shared: Any,
) -> Any:
    """Train two models in one loop that learn from each other: on unlabelled text, or on a task with --task."""
    given = locals() | shared
    from kdcli.recipe.resolve import resolve, verb_of
    from kdcli.verbs.cotrain.settings import CotrainRecipe, CotrainTaskRecipe

    on_task = task is not None or (
        shared["recipe"] is not None and verb_of(shared["recipe"]) == "cotrain-task"
    )
    for name in ("community", "vocab_size", "eval_task") if on_task else ():
        if given[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} belongs to co-training on text, not on a task"
            )
    from kdcli.verbs.cotrain.run import cotrain as train

    own = {
        name: given[name]
        for name in ("teacher", "student", "base", "mode", "temperature", "standalone")
    }
    own |= {"weights": parse_weights(weights)} | training_options(given)
    on_text = {"community.model": community, "vocab_size": vocab_size, "eval.tasks": eval_task}
    own |= {"task": task} if on_task else on_text
    model: type[CotrainRecipe | CotrainTaskRecipe] = CotrainTaskRecipe if on_task else CotrainRecipe
    resolved = resolve(model, recipe=shared["recipe"], sets=shared["sets"] or (), options=own)
    return show(train(resolved, run_options(given)), as_json=shared["json"])


def parse_weights(text: str | None) -> list[float] | None:
    """`1:1:1:4` as numbers; their values are checked with the recipe. Raises UsageError: a part is no number."""
    try:
        return None if text is None else [float(part) for part in text.split(":")]
    except ValueError:
        raise UsageError(
            f"--weights takes four numbers, got '{text}'",
            "student against labels : student from teacher : teacher against labels : teacher from student, for "
            "example 1:1:1:4",
        ) from None
