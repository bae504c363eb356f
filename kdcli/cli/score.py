"""The verbs that say what a model is worth: finetune, evaluate, benchmark; and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import JUDGING, LOADING, TRAINING, Task, invocation_of, show, training_options, with_options


@app.command()
@with_options(*TRAINING)
def finetune(
    model: Annotated[str | None, typer.Argument(help="Hub id, directory, or 'demo'.")] = None,
    task: Task = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of every setting, each with a seed of its own.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2…", help="Try every value, e.g. lr=2e-5,3e-5; may be repeated."),
    ] = None,
    **shared: Any,
) -> None:
    """Fine-tune an encoder on a labelled task and report what it scores."""
    given = locals() | shared
    from kdcli.recipe import grid_options
    from kdcli.settings import FinetuneRecipe
    from kdcli.stage_recipes import finetune_recipe

    own = {"model": model, "task": task, "seeds": seeds, **grid_options(FinetuneRecipe, grid or ())}
    resolved = finetune_recipe(
        recipe=shared["recipe"], sets=shared["sets"] or (), options=own | training_options(given)
    )
    invocation = invocation_of(given)
    from kdcli.commands import finetune as command

    show(command.run(resolved, invocation), as_json=shared["json"])


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
    from kdcli.recipe import gates, resolve
    from kdcli.settings import EvaluateRecipe

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
    from kdcli.commands import evaluate as command

    extras = command.Extras(predictions=predictions, submission=submission, gates=least)
    result = command.run(resolved, invocation, extras)
    show(result, as_json=shared["json"])
    if result is not None:
        command.hold_gates(result, extras)


@app.command()
@with_options(*JUDGING)
def benchmark(
    models: Annotated[list[str] | None, typer.Argument(help="Hub ids, directories, or shapes such as 6x384.")] = None,
    baseline: Annotated[str | None, typer.Option(help="What the others are compared with; default the first.")] = None,
    preset: Annotated[str | None, typer.Option(help="minilm, tinybert or serving.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="NAME[-DTYPE]", help="torch, compile, onnx, openvino; e.g. onnx-int8.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Sequences; may be repeated.")] = None,
    seq_len: Annotated[list[int] | None, typer.Option(help="Tokens; may be repeated.")] = None,
    padding: Annotated[str | None, typer.Option(help="full, random, or data (lengths of --data).")] = None,
    task: Annotated[str | None, typer.Option(help="Judge every backend on this task too.")] = None,
    project: Annotated[str | None, typer.Option(metavar="CARD,…", help="Estimate for cards, e.g. p100,k80.")] = None,
    portable: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a runner for old machines.")] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Report runs side by side; measures nothing; repeatable.")
    ] = None,
    max_latency_ms: Annotated[float | None, typer.Option(help="Exit 5 above this p50 in the first cell.")] = None,
    min_speedup: Annotated[float | None, typer.Option(help="Exit 5 below this speed-up in the first cell.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 6 when a measurement is unstable.")] = False,
    **shared: Any,
) -> None:
    """Measure latency of models or shapes beside a baseline, interleaved, on several backends."""
    given = locals() | shared
    from kdcli.recipe import resolve
    from kdcli.settings import BenchmarkRecipe

    options = {
        "models": models,
        "baseline": baseline,
        "preset": preset,
        "backends": backend,
        "batch_sizes": batch_size,
        "seq_lens": seq_len,
        "padding": padding,
        "project": project.split(",") if project else None,
        "task": task,
        "data.source": shared["data"],
    }
    resolved = resolve(BenchmarkRecipe, recipe=shared["recipe"], sets=shared["sets"] or (), options=options)
    invocation = invocation_of(given)
    from kdcli.commands import benchmark as command

    if portable is not None:
        show(command.write_runner(resolved, portable), as_json=shared["json"])
        return
    if compare:
        show(command.compare(resolved, invocation, compare), as_json=shared["json"])
        return
    result = command.run(resolved, invocation)
    show(result, as_json=shared["json"])
    command.hold_gates(result, command.Gates(max_latency_ms, min_speedup, strict))


@app.command()
@with_options(*LOADING)
def export(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or 'demo'; its head goes with it.")],
    file_format: Annotated[str, typer.Option("--format", metavar="onnx|openvino", help="What to write.")],
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to 8 bits.")] = False,
    **shared: Any,
) -> None:
    """Write a model as ONNX or OpenVINO, compared with torch before it is kept."""
    from kdcli.commands import export as command

    result = command.run(
        model,
        format=file_format,
        int8=int8,
        output_dir=shared["output_dir"],
        overwrite=shared["overwrite"],
        trust_remote_code=shared["trust_remote_code"],
    )
    show(result, as_json=shared["json"])
