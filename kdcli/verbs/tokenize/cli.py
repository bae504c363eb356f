"""`kdcli tokenize`."""

from kdcli.cli.verb import PRINTING, TRAIN, Given, Printable, verb

SHARED = ("output_dir", "dry_run", "trust_remote_code", "strict_data", *PRINTING)


@verb(
    *SHARED,
    examples=("kdcli tokenize corpus/ --tokenizer bert-base-uncased -o tokens",),
    panel=TRAIN,
)
def tokenize(given: Given) -> Printable | None:
    """Tokenise a large text once, in several processes.

    Pass the directory to a training command with --data.
    """
    from kdcli.verbs.tokenize.settings import TokenizeOptions

    options, own = given.run_options, given.of(TokenizeOptions)
    from kdcli.verbs.tokenize import run

    tokenised = run.tokenize(
        source=own.source,
        tokenizer=own.tokenizer,
        column=own.column,
        share=own.share,
        workers=own.workers,
        output_dir=options.output_dir,
        dry_run=options.dry_run,
    )
    return given.show(tokenised)
