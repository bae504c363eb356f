"""`kdcli compress`."""

from kdcli.cli.verb import COMPRESS, SCORING, Given, Printable, verb


@verb(
    *SCORING,
    "processes",
    "resume",
    examples=(
        "kdcli compress demo-classifier --data demo --max-drop 1.0",
        "kdcli compress my-org/ticket-classifier --data tickets.csv --max-drop 3.0 --speedup 5",
    ),
    panel=COMPRESS,
)
def compress(given: Given) -> Printable | None:
    """Distill, prune and export a model until it is small and fast enough for a goal."""
    from kdcli.verbs.compress.settings import CompressOptions, compress_recipe

    if (folder := given.of(CompressOptions).front) is not None:
        from kdcli.verbs.compress.compress_candidates import Front

        return given.show(Front.read(folder))
    options, keys = given.run_options, given.keys()
    resolved = compress_recipe(recipe=given.recipe, sets=given.sets, options=keys)
    from kdcli.verbs.compress.run import run

    return given.show(run(resolved, options))
