"""`kdcli trim`."""

from kdcli.cli.verb import COMPRESS, SAVING, Given, Printable, verb


@verb(
    "sets",
    "device",
    *SAVING,
    examples=(
        "kdcli trim demo --data demo --vocab-size 500",
        "kdcli trim my-org/ticket-classifier --data tickets.csv --max-drop 0.5",
    ),
    panel=COMPRESS,
)
def trim(given: Given) -> Printable | None:
    """Remove the tokens that your text does not need from a model's vocabulary."""
    from kdcli.verbs.trim.settings import TrimRecipe

    options = given.run_options
    resolved = given.resolve(TrimRecipe)
    from kdcli.verbs.trim import run

    result = run.trim(resolved, options)
    if result is None:
        return None
    shown = given.show(result.run)
    result.check()
    return shown
