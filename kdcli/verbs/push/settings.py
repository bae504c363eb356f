"""The options of `kdcli push`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.options import Option


@dataclass(frozen=True)
class PushOptions:
    """Options of `kdcli push`."""

    directory: Annotated[
        Path,
        Option("directory", metavar="DIR"),
        Field(description="Directory of a model or an export."),
    ]
    repository: Annotated[
        str,
        Option("repository", metavar="REPO"),
        Field(description="Repository on the hub, OWNER/NAME; created if it does not exist."),
    ]
    public: Annotated[
        bool,
        Option("--public"),
        Field(description="Make a new repository public instead of private."),
    ] = False
    with_report: Annotated[
        bool,
        Option("--with-report"),
        Field(
            description="Also push the report and the recipe, which may quote evaluated rows and "
            "name local paths."
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Option("--dry-run"),
        Field(description="List the files and push nothing."),
    ] = False


OPTIONS = {"push": PushOptions}
