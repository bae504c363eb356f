"""The options of `kdcli mask`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import (
    PRINTING,
    show,
    with_options,
)

mask = typer.Typer(no_args_is_help=True, help="Mask files: look, compare, apply, compact.")
app.add_typer(mask, name="mask")


@mask.command("info")
@with_options("json")
def mask_info(
    file: Annotated[Path, typer.Argument(help="A mask file.")],
    **shared: Any,
) -> None:
    """What a mask is of, and how much it keeps."""
    from kdcli.commands.mask import run as command

    show(command.info(file), as_json=shared["json"])


@mask.command("diff")
@with_options("json")
def mask_diff(
    first: Annotated[Path, typer.Argument(help="A mask file.")],
    second: Annotated[Path, typer.Argument(help="Another one of the same base.")],
    **shared: Any,
) -> None:
    """How much two masks have in common."""
    from kdcli.commands.mask import run as command

    show(command.diff(first, second), as_json=shared["json"])


Base = Annotated[str | None, typer.Option(help="Where the base is; default where the mask says.", metavar="MODEL")]


Masking = Annotated[str, typer.Option(help="local, global or proportional; of --sparsity.")]


Cut = Annotated[float | None, typer.Option(help="Cut the scores anew, so that this share goes.")]


@mask.command("apply")
@with_options("output_dir", "trust_remote_code", *PRINTING)
def mask_apply(
    file: Annotated[Path, typer.Argument(help="A mask file, or an .npy of the SMP authors.")],
    base: Base = None,
    sparsity: Cut = None,
    masking: Masking = "proportional",
    **shared: Any,
) -> None:
    """Save the masked model, with zeros: it loads anywhere and is not faster."""
    _applied(locals() | shared, compacted=False, drop_rows_below=0)


@mask.command("compact")
@with_options("output_dir", "trust_remote_code", *PRINTING)
def mask_compact(
    file: Annotated[Path, typer.Argument(help="A mask file, or an .npy of the SMP authors.")],
    base: Base = None,
    sparsity: Cut = None,
    masking: Masking = "proportional",
    drop_rows_below: Annotated[int, typer.Option(help="Take rows with fewer weights for empty.")] = 0,
    **shared: Any,
) -> None:
    """Save the model without its empty rows, columns and heads: smaller and faster."""
    _applied(locals() | shared, compacted=True, drop_rows_below=drop_rows_below)


def _applied(given: Mapping[str, Any], *, compacted: bool, drop_rows_below: int) -> None:
    from kdcli.commands.mask import run as command

    names = ("base", "sparsity", "masking", "output_dir", "trust_remote_code")
    made = command.apply(
        given["file"], compacted=compacted, drop_rows_below=drop_rows_below, **{name: given[name] for name in names}
    )
    show(made, as_json=given["json"])
