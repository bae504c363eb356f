"""The options of `kdcli mask`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import PRINTING, show, with_options
from kdcli.errors import UsageError

mask = typer.Typer(no_args_is_help=True, help="Mask files: look, compare, apply, compact.")
app.add_typer(mask, name="mask")

MaskPath = Annotated[Path, typer.Argument(help="A mask file.")]
AnyMask = Annotated[Path, typer.Argument(help="A mask file, or an .npy of the SMP authors.")]
Base = Annotated[
    str | None, typer.Option(help="Where the base is; default: named in the mask.", metavar="MODEL")
]
Masking = Annotated[
    str | None, typer.Option(help="local, global or proportional (default); of --sparsity.")
]
OfTask = Annotated[
    str | None, typer.Option("--task", help="Of an .npy: the task of its head.", metavar="TASK")
]
Sparsity = Annotated[
    float | None, typer.Option(help="Re-threshold the stored scores at this sparsity.")
]


@mask.command("info")
@with_options("json")
def mask_info(file: MaskPath, **shared: Any) -> Any:
    """Show what a mask is for, and how much it keeps."""
    from kdcli.verbs.mask import run

    return show(run.info(file), as_json=shared["json"])


@mask.command("diff")
@with_options("json")
def mask_diff(
    first: MaskPath,
    second: Annotated[Path, typer.Argument(help="Another one of the same base.")],
    **shared: Any,
) -> Any:
    """Compare two masks."""
    from kdcli.verbs.mask import run

    return show(run.diff(first, second), as_json=shared["json"])


@mask.command("apply")
@with_options("output_dir", "sets", "trust_remote_code", *PRINTING)
def mask_apply(
    file: AnyMask,
    base: Base = None,
    task: OfTask = None,
    sparsity: Sparsity = None,
    masking: Masking = None,
    **shared: Any,
) -> Any:
    """Save the masked model, with zeros: it loads anywhere and is not faster."""
    _save(locals() | shared)


@mask.command("compact")
@with_options("output_dir", "sets", "trust_remote_code", *PRINTING)
def mask_compact(
    file: AnyMask,
    base: Base = None,
    task: OfTask = None,
    sparsity: Sparsity = None,
    masking: Masking = None,
    drop_rows_below: Annotated[
        int, typer.Option(help="Treat rows with fewer than N weights as empty.")
    ] = 0,
    **shared: Any,
) -> Any:
    """Save the model without its empty rows, columns and heads: smaller and faster."""
    _save(locals() | shared, compacted=True, drop_rows_below=drop_rows_below)


def _save(given: dict[str, Any], **how: Any) -> Any:
    if given["masking"] is not None and given["sparsity"] is None:
        raise UsageError("--masking changes nothing without --sparsity", "add --sparsity")
    from kdcli.verbs.mask import run

    how |= {
        name: given[name]
        for name in ("base", "task", "sparsity", "output_dir", "trust_remote_code")
    }
    how |= {"sets": given["sets"] or (), "masking": given["masking"] or "proportional"}
    return show(run.apply(given["file"], **how), as_json=given["json"])
