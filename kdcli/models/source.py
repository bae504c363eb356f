"""Check the source of a model without loading a large library."""

import re

from huggingface_hub import constants, try_to_load_from_cache

from kdcli.disk import EMBEDDED, user_path
from kdcli.errors import UsageError

HUB_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
"""A model on the hub, without a revision."""


def check_source(source: str) -> None:
    """Check that a source can be a model: a directory, a hub id or a model inside the package.

    Offline, a hub id is looked up in the cache.

    Raises UsageError if there is certainly no model.
    """
    if source in EMBEDDED:
        return
    folder = user_path(source)
    if folder.is_dir():
        return
    name, _, revision = source.partition("@")
    if folder.exists() or source.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UsageError(
            f"no model directory {source}", "give a hub id, a directory with config.json, or 'demo'"
        )
    if not constants.HF_HUB_OFFLINE or not HUB_NAME.fullmatch(name):
        return
    if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str):
        raise UsageError(
            f"model '{source}' was found neither as a directory nor in the Hugging Face cache",
            "check the name, or use a local directory or 'demo'; HF_HUB_OFFLINE=1 forbids asking "
            "the hub",
        )
