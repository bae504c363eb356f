"""`kdcli mask`."""

import typer

from kdcli.cli.app import app
from kdcli.cli.help import Group
from kdcli.cli.verb import INSPECT, PRINTING, Given, Printable, verb

SHARED = ("output_dir", "sets", "trust_remote_code", *PRINTING)

mask = typer.Typer(cls=Group, help="Show, compare, apply and compact the masks that prune writes.")
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
    from kdcli.verbs.mask import run
    from kdcli.verbs.mask.settings import ApplyOptions

    return given.show(run.apply(given.of(ApplyOptions), given.sets, given.run_options.output_dir))


@verb(
    *SHARED,
    group=mask,
    examples=("kdcli mask compact runs/sst2/mask/mask.safetensors -o small",),
    page="mask",
)
def compact(given: Given) -> Printable | None:
    """Save the model without its empty rows, columns and heads: smaller and faster."""
    from kdcli.verbs.mask import run
    from kdcli.verbs.mask.settings import CompactOptions

    return given.show(run.apply(given.of(CompactOptions), given.sets, given.run_options.output_dir))
