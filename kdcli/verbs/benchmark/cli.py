"""The options of `kdcli benchmark`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import JUDGING, run_options, show, with_options


@app.command()
@with_options(*JUDGING, "dtype")
def benchmark(
    models: Annotated[
        list[str] | None, typer.Argument(help="Hub ids, directories, or shapes such as 6x384.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Model to compare with; default the first.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="papers (without models), minilm, tinybert or serving.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[-DTYPE]", help="torch, compile, onnx, openvino; e.g. onnx-int8."
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Sequences; may be repeated.")
    ] = None,
    seq_len: Annotated[list[int] | None, typer.Option(help="Tokens; may be repeated.")] = None,
    padding: Annotated[
        str | None, typer.Option(help="full, random, or data (lengths of --data).")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Evaluate every backend on this task too.")
    ] = None,
    portable: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a runner for old machines.")
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Report runs side by side, measure nothing; repeatable."),
    ] = None,
    max_latency_ms: Annotated[
        float | None, typer.Option(help="Exit 5 above this p50 in the first cell.")
    ] = None,
    min_speedup: Annotated[
        float | None, typer.Option(help="Exit 5 below this speed-up in the first cell.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 6 when a measurement is unstable.")
    ] = False,
    **shared: Any,
) -> Any:
    """Measure latency of models or shapes beside a baseline, interleaved, on several backends."""
    given = locals() | shared
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.benchmark.settings import BenchmarkRecipe

    options = {
        name: given[name] for name in ("models", "baseline", "preset", "padding", "task", "dtype")
    }
    options |= {
        "backends": backend,
        "batch_sizes": batch_size,
        "seq_lens": seq_len,
        "data.source": shared["data"],
    }
    resolved = resolve(
        BenchmarkRecipe, recipe=shared["recipe"], sets=shared["sets"] or (), options=options
    )
    invocation = run_options(given)
    # After the recipe is checked, because this import takes seconds.
    from kdcli.verbs.benchmark import run as command

    if portable is not None:
        return show(command.write_runner(resolved, portable), as_json=shared["json"])
    if compare:
        return show(command.compare(resolved, invocation, compare), as_json=shared["json"])
    result = show(command.benchmark(resolved, invocation), as_json=shared["json"])
    command.check_gates(
        result.report, result.folder, command.Gates(max_latency_ms, min_speedup, strict)
    )
    return result
