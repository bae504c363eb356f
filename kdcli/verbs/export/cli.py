"""The options of `kdcli export`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import MAKING, Pooling, show, with_options


@app.command()
@with_options("data", "sets", *MAKING)
def export(
    model: Annotated[
        str, typer.Argument(help="Hub id, directory, or 'demo'; its head goes with it.")
    ],
    file_format: Annotated[
        str, typer.Option("--format", metavar="onnx|openvino", help="What to write.")
    ],
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to 8 bits.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Half precision; ONNX.")] = False,
    q4: Annotated[bool, typer.Option("--q4", help="Weights in 4 bits; ONNX.")] = False,
    max_drop: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS", help="Keep products in float32 until at most this is lost; 1 = 0.01."
        ),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also write model.safetensors.")
    ] = False,
    pooling: Pooling = None,
    task: Annotated[
        str | None, typer.Option(help="Judge the file on this task, on --data.")
    ] = None,
    **shared: Any,
) -> Any:
    """Write a model as ONNX or OpenVINO, compared with torch before it is kept. Several of --int8, --fp16 and --q4
    write their files beside the float32 one."""
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.export.run import ExportRecipe
    from kdcli.verbs.export.run import export as write

    options = {"data.source": shared["data"]}
    data = resolve(
        ExportRecipe, recipe=None, sets=shared["sets"] or (), options=options
    ).recipe.data
    given = {"data": data} | {
        key: shared[key] for key in ("output_dir", "overwrite", "trust_remote_code")
    }
    given |= {"pooling": pooling, "task": task, "max_drop": max_drop, "weights": weights}
    smaller = [name for name, wanted in (("int8", int8), ("fp16", fp16), ("q4", q4)) if wanted]
    given["precisions"] = smaller if len(smaller) == 1 else ["fp32", *smaller]
    return show(write(model, format=file_format, **given), as_json=shared["json"])
