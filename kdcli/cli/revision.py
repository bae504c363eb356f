"""`--revision REV`: the model at a branch, a tag or a commit."""

import re
from pathlib import Path

from kdcli.errors import UsageError

HUB_MODEL = r"(\w[\w.-]*/)?\w[\w.-]*"
"""A model on the hub: `owner/name`, or `name`."""


def pinned(model: str | list[str] | None, revision: str) -> str | list[str]:
    """Add `@REVISION` to a verb's only model.

    Args:
        model: A model, or a list with one model.
        revision: A branch, a tag or a commit.

    Raises:
        UsageError: There is not exactly one model, the model is not on the hub, or it names
            another revision.
    """
    if isinstance(model, list) and len(model) == 1:
        return [_pinned(model[0], revision)]
    if not model or isinstance(model, list):
        number = "several were" if model else "none was"
        raise UsageError(
            f"--revision applies to one model, but {number} given",
            "write MODEL@REV for each, or in the recipe",
        )
    return _pinned(model, revision)


def _pinned(model: str, revision: str) -> str:
    from kdcli.disk import EMBEDDED

    name, at, current = model.partition("@")
    if Path(model).exists() or name in EMBEDDED or not re.fullmatch(HUB_MODEL, name):
        raise UsageError(f"{model} has no revisions: it is not on the hub", "remove --revision")
    if not re.fullmatch(r"[\w./-]+", revision):
        raise UsageError(f"--revision takes a branch, a tag or a commit, got '{revision}'")
    if at and current != revision:
        message = f"{model} and --revision {revision} contradict each other"
        raise UsageError(message, "give one of them")
    return f"{name}@{revision}"
