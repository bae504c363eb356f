"""Push a model directory to a repository of the hub.

Only files that a model needs are pushed. A report quotes evaluated rows and a recipe names local
paths, so both stay unless they are asked for. Hashes of training rows always stay, because they
would let anyone test whether a short text was trained on.
"""

import glob
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx, validate_repo_id  # type: ignore[attr-defined]
from rich.table import Table

from kdcli.errors import UsageError
from kdcli.models.files import CONFIG_FILE, hint_of_models, model_files
from kdcli.report.text import bytes_of

REPORT_FILES = ("recipe.yaml", "report.json", "report.md", "report.html", "*.png", "*.csv")
"""Files of a report."""
LOGIN = "check the name, and log in with a token that may write: `hf auth login`"


@dataclass(frozen=True)
class Upload:
    """The files of a directory that are pushed, and the ones that stay.

    Attributes:
        folder: The directory.
        files: The sizes of the pushed files, by their paths below the directory.
        kept: The paths of the files that stay on this machine.
    """

    folder: Path
    files: dict[str, int]
    kept: list[str]

    @classmethod
    def of(cls, folder: Path, *, with_report: bool = False) -> "Upload":
        """Choose the files of a model or an export.

        Raises:
            UsageError: The directory holds no model.
        """
        if not (folder / CONFIG_FILE).is_file():
            message = f"{folder} has no {CONFIG_FILE}, so it is not a model directory"
            raise UsageError(message, hint_of_models(folder))
        every = sorted(p for p in folder.rglob("*") if p.is_file())
        names = model_files(folder, more=REPORT_FILES if with_report else ())
        files = {name: (folder / name).stat().st_size for name in names}
        kept = [n for n in (p.relative_to(folder).as_posix() for p in every) if n not in files]
        return cls(folder, files, kept)

    def to_json(self) -> str:
        return json.dumps({"files": self.files, "kept": self.kept}, indent=2)

    def renderables(self) -> Iterable[object]:
        table = Table("file to push", "size")
        for name, size in self.files.items():
            table.add_row(name, bytes_of(size))
        yield table
        if self.kept:
            yield f"not pushed: {', '.join(self.kept)}"


@dataclass(frozen=True)
class Published:
    """A commit that was pushed to a repository."""

    repository: str
    revision: str
    url: str
    private: bool

    @property
    def sentence(self) -> str:
        """Return the message for the terminal."""
        kind = "private" if self.private else "public"
        return f"pushed to {self.repository} ({kind}), revision {self.revision}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def renderables(self) -> Iterable[object]:
        yield self.sentence


def check_repository(repository: str) -> None:
    """Check that a repository's name is valid and that there is a token, without a request.

    Raises:
        UsageError: The name is not valid, or there is no token.
    """
    try:
        validate_repo_id(repository)
        is_valid = "/" in repository
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise UsageError(
            f"'{repository}' is not the name of a repository",
            "give OWNER/NAME; OWNER is your account or an organisation",
        )
    if get_token() is None:
        raise UsageError(f"cannot push to {repository}: there is no token for the hub", LOGIN)


def publish(upload: Upload, repository: str, *, private: bool = True) -> Published:
    """Push the files of a model to a repository, which is created if it does not exist.

    An existing repository keeps its visibility.

    Raises:
        UsageError: The hub refuses the push.
    """
    check_repository(repository)
    hub = HfApi(library_name="kdcli")
    try:
        name = hub.create_repo(repository, private=private, exist_ok=True).repo_id
        commit = hub.upload_folder(
            repo_id=name,
            folder_path=upload.folder,
            commit_message="Pushed by kdcli",
            allow_patterns=[glob.escape(file) for file in upload.files],
        )
        is_private = bool(hub.model_info(name).private)
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{upload.folder} cannot be pushed to {repository}: {reason}", LOGIN
        ) from None
    return Published(name, str(commit.oid), str(commit.commit_url), is_private)
