"""`kdcli cache`."""

import typer

from kdcli.cli.app import app
from kdcli.cli.help import Group
from kdcli.cli.verb import INSPECT, Given, Printable, verb

cache = typer.Typer(cls=Group, help="Show and delete what kdcli caches.")
app.add_typer(cache, name="cache", rich_help_panel=INSPECT)


@verb("json", group=cache, examples=("kdcli cache ls",), page="cache")
def ls(given: Given) -> Printable | None:
    """Show what the cache holds: kind, model or data, size and last use."""
    from kdcli.verbs.cache import run

    return given.show(run.ls())


@verb(
    "json",
    group=cache,
    examples=(
        "kdcli cache clean vectors",
        "kdcli cache clean --older-than 30d",
        "kdcli cache clean --yes",
    ),
    page="cache",
)
def clean(given: Given) -> Printable | None:
    """Delete entries of the cache that no running kdcli uses.

    Without a kind or an age, it shows the entries and asks first. It deletes objects only if named.
    """
    from kdcli.verbs.cache import run
    from kdcli.verbs.cache.settings import CleanOptions

    own = given.of(CleanOptions)
    entries = run.selected(own)
    if entries and not own.kinds and own.older_than is None and not own.yes:
        entries = entries if run.confirmed(entries) else []
    cleaned = given.show(run.clean(entries))
    cleaned.check()
    return cleaned
