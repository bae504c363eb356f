"""The options of `kdcli push`."""

from pathlib import Path
from typing import Annotated

from pydantic.dataclasses import dataclass

from kdcli.recipe.options import OF_OPTIONS, Option


@dataclass(frozen=True, config=OF_OPTIONS)
class PushOptions:
    """Options of `kdcli push`."""

    directory: Annotated[Path, Option("directory", metavar="DIR")]
    """Directory of a model or an export."""
    repository: Annotated[str, Option("repository", metavar="REPO")]
    """Repository on the hub, OWNER/NAME; created if it does not exist."""
    public: Annotated[bool, Option("--public")] = False
    """Make a new repository public instead of private."""
    with_report: Annotated[bool, Option("--with-report")] = False
    """Also push the report and the recipe, which may quote evaluated rows and name local paths."""
    dry_run: Annotated[bool, Option("--dry-run")] = False
    """List the files and push nothing."""


OPTIONS = {"push": PushOptions}
