"""`--revision REV`: the model at a branch, a tag or a commit."""

import re
from pathlib import Path
from typing import Any

from kdcli.data.demo import EMBEDDED
from kdcli.errors import UsageError

HUB_ID = r"(\w[\w.-]*/)?\w[\w.-]*"


def pinned(model: Any, revision: str) -> Any:
    """Return `MODEL@REVISION` for a verb's one model.

    Args:
        model: A model, or a list with one model.
        revision: A branch, a tag or a commit.

    Raises:
        UsageError: There is no model or more than one, it is not on the hub, or it names another
            revision.
    """
    if isinstance(model, list) and len(model) == 1:
        return [pinned(model[0], revision)]
    if not model or isinstance(model, list):
        number = "several were" if model else "none was"
        raise UsageError(
            f"--revision applies to one model, but {number} given",
            "write MODEL@REV for each, or in the recipe",
        )
    name, at, current = model.partition("@")
    if Path(model).exists() or name in EMBEDDED or not re.fullmatch(HUB_ID, name):
        raise UsageError(f"{model} has no revisions: it is not on the hub", "remove --revision")
    if not re.fullmatch(r"[\w./-]+", revision):
        raise UsageError(f"--revision takes a branch, a tag or a commit, got '{revision}'")
    if at and current != revision:
        message = f"{model} and --revision {revision} contradict each other"
        raise UsageError(message, "give one of them")
    return f"{name}@{revision}"
