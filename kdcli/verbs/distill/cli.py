"""The options of `kdcli distill`."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.complete import complete_shape
from kdcli.cli.options import (
    ON_TASK,
    TRAINING,
    EvalTask,
    Pooling,
    Task,
    run_options,
    show,
    training_options,
    with_options,
)
from kdcli.errors import UsageError
from kdcli.recipe.methods import method_names

TASK_ONLY = (
    "general",
    "corpus",
    "more_teachers",
    "soft_labels",
    "augment",
    "augment_model",
    "glove",
    "augment_only",
)
on_task = partial(typer.Option, rich_help_panel=ON_TASK)


@app.command()
@with_options(*TRAINING)
def distill(
    teacher: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LxH[:FFN][@HEADS]",
            help="Student shape, e.g. 6x768; may be repeated.",
            autocompletion=complete_shape,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(method_names('kdcli.losses', 'objective', 'text', 'masked', 'sentences'))}; "
            f"on tasks {', '.join(method_names('kdcli.losses', 'objective', 'task'))}.",
            show_default=False,
        ),
    ] = None,
    task: Task = None,
    student: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Start from this encoder; on text by --method embedding."),
    ] = None,
    general: Annotated[
        str | None, on_task(metavar="DIR", help="First distil on text, in this directory.")
    ] = None,
    corpus: Annotated[
        str | None, on_task(metavar="SOURCE", help="Text of that stage; enables it.")
    ] = None,
    more_teachers: Annotated[
        list[str] | None,
        on_task("--also-teacher", help="A further teacher of the task; repeatable."),
    ] = None,
    soft_labels: Annotated[
        str | None,
        on_task(metavar="FILE", help="Probabilities or scores of the rows, in place of a teacher."),
    ] = None,
    augment: Annotated[
        bool | None, on_task("--augment/--no-augment", help="Train on copies with other words too.")
    ] = None,
    augment_model: Annotated[
        str | None, on_task(help="Masked language model that names words.")
    ] = None,
    glove: Annotated[
        str | None, on_task(metavar="FILE", help="Word vectors for long words.")
    ] = None,
    augment_only: Annotated[
        Path | None, on_task(metavar="FILE", help="Write the copies as jsonl and stop.")
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Also run the variants of this list; one table."),
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(help="Teacher assistant: auto, none or LxH.")
    ] = None,
    eval_task: EvalTask = None,
    pooling: Pooling = None,
    teacher_vectors: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The teacher's vectors of the texts, as .npy or .parquet."
        ),
    ] = None,
    **shared: Any,
) -> Any:
    """Train a smaller student of an encoder: on unlabelled text (MiniLM, TinyBERT ...), or on a task with --task."""
    given = locals() | shared
    from kdcli.recipe.resolve import resolve, verb_of
    from kdcli.verbs.distill.settings import DistillRecipe

    if task == "rerank" or (shared["recipe"] is not None and verb_of(shared["recipe"]) == "rerank"):
        return _distill_reranker(given)
    if task is not None or (
        shared["recipe"] is not None and verb_of(shared["recipe"]) == "distill-task"
    ):
        return _distill_on_task(given)
    from kdcli.verbs.distill.outputs import is_reranker_here

    if method is None and shared["recipe"] is None and is_reranker_here(teacher):
        from kdcli.engine.progress import Progress

        Progress.log(
            f"{teacher} gives a pair one score: it is distilled as a reranker; --method distils its encoder"
        )
        return _distill_reranker(given)
    for name in TASK_ONLY:
        if given[name]:
            option = "also-teacher" if name == "more_teachers" else name.replace("_", "-")
            raise UsageError(f"--{option} needs --task", "it belongs to distilling on a task")
    own: dict[str, Any] = {
        "teacher": teacher,
        "student.to": to,
        "student.source": student,
        "method": method,
    }
    own |= {"assistant": assistant, "eval.tasks": eval_task}
    own |= {"embedding.pooling": pooling, "embedding.vectors": teacher_vectors}
    if ablate is not None:
        from kdcli.verbs.distill.recipes import ablations

        own["variants"] = ablations(ablate)
    resolved = resolve(
        DistillRecipe,
        recipe=shared["recipe"],
        beneath=_demo_recipe(method, shared["sets"] or ())
        if teacher == "demo" and not shared["recipe"]
        else None,
        sets=shared["sets"] or (),
        options=own | training_options(given),
    )
    from kdcli.verbs.distill.run import distill as train

    return show(train(resolved, run_options(given)), as_json=shared["json"])


def _demo_recipe(method: str | None, sets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The recipe of `distill demo`; with another method, without the settings of its loss."""
    from kdcli.recipe.resolve import flatten, read_recipe

    method = method or dict(each.split("=", 1) for each in sets if "=" in each).get("method")
    name = "demo-embedding" if method == "embedding" else "demo"
    values = dict(flatten(read_recipe(name, "distill")))
    if method not in (None, "minilm", "embedding"):
        values = {key: value for key, value in values.items() if not key.startswith("loss.")}
    return {f"recipe {name}": values}


def _distill_reranker(given: Mapping[str, Any]) -> Any:
    for name in (
        *TASK_ONLY,
        "ablate",
        "assistant",
        "eval_task",
        "pooling",
        "teacher_vectors",
        "method",
    ):
        if given[name]:
            option = "also-teacher" if name == "more_teachers" else name.replace("_", "-")
            hint = (
                "the loss is ranking.loss: margin-mse, listwise or pointwise"
                if name == "method"
                else None
            )
            raise UsageError(f"--{option} does not go with --task rerank", hint)
    if len(given["to"] or ()) > 1:
        raise UsageError(
            f"one reranker is distilled at a time, {len(given['to'])} shapes were given"
        )
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.distill.outputs import distill_reranker
    from kdcli.workloads.settings import RerankRecipe

    own = {"teacher": given["teacher"], "student.source": given["student"]}
    own["student.to"] = given["to"][0] if given["to"] else None
    options = own | training_options(given)
    resolved = resolve(
        RerankRecipe, recipe=given["recipe"], sets=given["sets"] or (), options=options
    )
    return show(distill_reranker(resolved, run_options(given)), as_json=given["json"])


def _distill_on_task(given: Mapping[str, Any]) -> Any:
    for name in ("assistant", "eval_task", "pooling", "teacher_vectors"):
        if given[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} belongs to distilling on text, not on a task"
            )
    copies = True if given["augment_only"] or given["glove"] or given["augment_model"] else None
    own = {
        name: given[name] for name in ("teacher", "method", "task", "more_teachers", "soft_labels")
    }
    own |= {"student.to": given["to"], "student.source": given["student"]}
    own |= {"general.run": given["general"], "general.source": given["corpus"]}
    own |= {"augment.model": given["augment_model"], "augment.glove": given["glove"]}
    own["general.use"] = True if given["general"] or given["corpus"] else None
    own["augment.use"] = given["augment"] if given["augment"] is not None else copies
    options = {
        "recipe": given["recipe"],
        "sets": given["sets"] or (),
        "options": own | training_options(given),
    }
    from kdcli.verbs.distill.recipes import ablations, task_recipe

    resolved, invocation = task_recipe(**options), run_options(given)
    ablate = given["ablate"] if given["augment_only"] is None else None
    listed = ablations(ablate) if ablate is not None else {}
    variants = {name: task_recipe(**options, overrides=changes) for name, changes in listed.items()}
    from kdcli.verbs.distill import labelled, run

    result: Any
    if given["augment_only"] is not None:
        result = labelled.write_copies(resolved, invocation, given["augment_only"])
    else:
        result = (
            run.distill_variants(variants, invocation)
            if variants
            else run.distill_on_task(resolved, invocation)
        )
    return show(result, as_json=given["json"])
