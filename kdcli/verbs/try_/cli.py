"""`kdcli try`."""

from kdcli.cli.verb import INSPECT, Given, Printable, verb


@verb(
    "quiet",
    "verbose",
    "trust_remote_code",
    examples=("kdcli try runs/sst2", "kdcli try runs/student --teacher bert-base-uncased"),
    panel=INSPECT,
)
def try_(given: Given) -> Printable | None:
    """Open a local page that shows what a model and its teacher say about your own texts."""
    from kdcli.verbs.try_.settings import TryOptions

    own = given.of(TryOptions)
    # Importing this takes seconds, so the options are checked first.
    from kdcli.verbs.try_ import run

    run.serve(own)
    return None
