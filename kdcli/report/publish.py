"""Push a model directory to a repository of the hub."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx, validate_repo_id  # type: ignore[attr-defined]

from kdcli.engine.run_dir import CHECKPOINTS
from kdcli.errors import UsageError

NOT_PUSHED = (f"{CHECKPOINTS}/*", "log.jsonl", ".*", "*/.*")  # files for resuming a run
CONFIG = "config.json"
LOGIN = "`hf auth login` with a token that may write, and the right name"


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

    def renderables(self) -> Iterable[Any]:
        yield self.sentence


def check_repository(repository: str) -> None:
    """Check that a repository's name is valid and that there is a token, without a request.

    Raises UsageError: the name is not valid, or there is no token.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise UsageError(
            f"'{repository}' is not the name of a repository",
            "give OWNER/NAME, or NAME for your own",
        ) from None
    if get_token() is None:
        raise UsageError(f"cannot push to {repository}: there is no token for the hub", LOGIN)


def publish(folder: Path, repository: str, *, private: bool = True) -> Published:
    """Push a model or an export to a repository, which is created if it does not exist.

    An existing repository keeps its visibility.

    Raises UsageError: there is nothing to push, or the hub refuses the push.
    """
    check_repository(repository)
    if not (folder / CONFIG).is_file():
        inside = sorted(str(path.parent.relative_to(folder)) for path in folder.glob(f"*/{CONFIG}"))
        hint = (
            f"there are models in {', '.join(inside)}: push one of them"
            if inside
            else "give the directory of a model"
        )
        raise UsageError(f"{folder} has no {CONFIG}, so it is not a model directory", hint)
    hub = HfApi(library_name="kdcli")
    try:
        name = hub.create_repo(repository, private=private, exist_ok=True).repo_id
        ignored = [*NOT_PUSHED, *(f"{path.parent.name}/*" for path in folder.glob(f"*/{CONFIG}"))]
        commit = hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Pushed by kdcli",
            ignore_patterns=ignored,
        )
        is_private = bool(hub.model_info(name).private)
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{folder} cannot be pushed to {repository}: {reason}", LOGIN) from None
    return Published(name, str(commit.oid), str(commit.commit_url), is_private)
