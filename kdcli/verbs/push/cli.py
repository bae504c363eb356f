"""`kdcli push`."""

from kdcli.cli.verb import PRINTING, SHIP, Given, Printable, verb


@verb(
    *PRINTING,
    examples=("kdcli push runs/student me/small-model --dry-run",),
    panel=SHIP,
    page="export",
)
def push(given: Given) -> Printable | None:
    """Push a model or an export to the hub, with its card and nothing else."""
    from kdcli.messages import log
    from kdcli.report.publish import Upload, publish
    from kdcli.verbs.push.settings import PushOptions

    own = given.of(PushOptions)
    upload = Upload.of(own.directory, with_report=own.with_report)
    if own.dry_run:
        return given.show(upload)
    log(f"pushing {', '.join(upload.files)}")
    return given.show(publish(upload, own.repository, private=not own.public))
