"""The options of `kdcli export`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import LOADING, Pooling, show, with_options


@app.command()
@with_options("data", *LOADING)
def export(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or 'demo'; its head goes with it.")],
    file_format: Annotated[str, typer.Option("--format", metavar="onnx|openvino", help="What to write.")],
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to 8 bits.")] = False,
    pooling: Pooling = None,
    task: Annotated[
        str | None, typer.Option(help="stsb, own or retrieval: judge the vectors of the file, on --data.")
    ] = None,
    **shared: Any,
) -> None:
    """Write a model as ONNX or OpenVINO, compared with torch before it is kept."""
    from kdcli.commands.export.run import run

    given = {key: shared[key] for key in ("data", "output_dir", "overwrite", "trust_remote_code")}
    given |= {"pooling": pooling, "task": task, "int8": int8}
    show(run(model, format=file_format, **given), as_json=shared["json"])
