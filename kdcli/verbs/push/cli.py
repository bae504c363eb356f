"""`kdcli push`."""

from typing import Any

from kdcli.cli.verb import PRINTING, Given, verb


@verb(*PRINTING, example="kdcli push runs/student me/small-model")
def push(given: Given) -> Any:
    """Push a model directory or an export to the hub."""
    from kdcli.report.publish import publish
    from kdcli.verbs.push.settings import PushOptions

    own = given.of(PushOptions)
    return given.show(publish(own.directory, own.repository, private=not own.public))
