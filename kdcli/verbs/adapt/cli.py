"""`kdcli adapt`."""

from kdcli.cli.verb import COMPRESS, SAVING, Given, Printable, verb


@verb(
    "sets",
    "device",
    "dry_run",
    *SAVING,
    examples=(
        "kdcli adapt new-model --index vectors.npy --data docs.txt -o adapter",
        "kdcli adapt new-model --index old.parquet --data scifact/ --encodes documents "
        "--index-model old-model",
    ),
    panel=COMPRESS,
)
def adapt(given: Given) -> Printable | None:
    """Map a new embedding model's vectors into an old index, so that the index can stay."""
    from kdcli.verbs.adapt.settings import AdaptRecipe

    options = given.run_options
    resolved = given.resolve(AdaptRecipe)
    from kdcli.verbs.adapt import run

    result = run.adapt(resolved, options)
    return None if result is None else given.show(result)
