"""`kdcli mask`."""

from typing import TYPE_CHECKING

import typer

from kdcli.cli.app import app
from kdcli.cli.help import Group
from kdcli.cli.show import Printable
from kdcli.cli.verb import INSPECT, PRINTING, Given, verb
from kdcli.errors import UsageError

if TYPE_CHECKING:
    from kdcli.verbs.mask.settings import ApplyOptions

SHARED = ("output_dir", "sets", "trust_remote_code", *PRINTING)

mask = typer.Typer(
    cls=Group, no_args_is_help=True, help="Show, compare, apply and compact mask files."
)
app.add_typer(mask, name="mask", rich_help_panel=INSPECT)


@verb(
    "json", group=mask, examples=("kdcli mask info runs/sst2/mask/mask.safetensors",), page="mask"
)
def info(given: Given) -> Printable | None:
    """Show what a mask is for, and how much it keeps."""
    from kdcli.verbs.mask import run
    from kdcli.verbs.mask.settings import InfoOptions

    return given.show(run.info(given.of(InfoOptions).file))


@verb(
    "json",
    group=mask,
    examples=("kdcli mask diff first.safetensors second.safetensors",),
    page="mask",
)
def diff(given: Given) -> Printable | None:
    """Compare two masks."""
    from kdcli.verbs.mask import run
    from kdcli.verbs.mask.settings import DiffOptions

    own = given.of(DiffOptions)
    return given.show(run.diff(own.first, own.second))


@verb(
    *SHARED,
    group=mask,
    examples=("kdcli mask apply runs/sst2/mask/mask.safetensors -o masked",),
    page="mask",
)
def apply(given: Given) -> Printable | None:
    """Save the masked model with zeros: it loads anywhere, and is not faster."""
    from kdcli.verbs.mask.settings import ApplyOptions

    return _save(given, given.of(ApplyOptions))


@verb(
    *SHARED,
    group=mask,
    examples=("kdcli mask compact runs/sst2/mask/mask.safetensors -o small",),
    page="mask",
)
def compact(given: Given) -> Printable | None:
    """Save the model without its empty rows, columns and heads: smaller and faster."""
    from kdcli.verbs.mask.settings import CompactOptions

    own = given.of(CompactOptions)
    return _save(given, own, compacted=True, drop_rows_below=own.drop_rows_below)


def _save(
    given: Given, own: "ApplyOptions", *, compacted: bool = False, drop_rows_below: int = 0
) -> Printable | None:
    if own.masking is not None and own.sparsity is None:
        raise UsageError("--masking changes nothing without --sparsity", "add --sparsity")
    options = given.run_options
    from kdcli.verbs.mask import run

    result = run.apply(
        own.file,
        base=own.base,
        sparsity=own.sparsity,
        masking=own.masking or "proportional",
        task=own.task,
        sets=given.sets,
        compacted=compacted,
        drop_rows_below=drop_rows_below,
        output_dir=options.output_dir,
    )
    return given.show(result)
