"""Check the source of a model without loading a large library."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants

from kdcli.disk import (
    EMBEDDED,
    REPORT_FILE,
    cached_file,
    holds_run,
    near_path,
    read_json,
    user_path,
)
from kdcli.errors import UsageError
from kdcli.types import ModelShape

HUB_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
"""A model on the hub, without a revision."""
MODEL_OR_REPORT = ("config.json", REPORT_FILE)
"""Files of a directory that holds a model or a finished run."""


def is_address(source: str) -> bool:
    """Return whether a model is named by the address of a server that computes its vectors."""
    return source.lower().startswith(("http://", "https://"))


def check_address(address: str) -> None:
    """Check the form of a server's address.

    Raises:
        UsageError: It has no host, a wrong port, a part after the path, or a user or a password,
            which would be written into the recipe of the run.
    """
    hint = "give an address such as http://localhost:8080 or https://HOST/v1"
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        # The address may hold a password, so it is not repeated.
        raise UsageError("the teacher's address is no URL with a host and a port", hint) from None
    if "@" in address:
        raise UsageError(
            f"the address of the teacher at {parts.hostname} holds a user name or a password",
            "remove it, and set KDCLI_TEACHER_API_KEY to the key of the server",
        )
    if parts.query or parts.fragment:
        raise UsageError(
            f"the address of the teacher at {parts.hostname} has a part after its path", hint
        )
    if not parts.hostname or port == 0:
        raise UsageError(f"{address} names no host", hint)


def check_source(source: str) -> None:
    """Check that a source can be a model: a directory, a hub id or a model inside the package.

    Offline, a hub id is looked up in the cache.

    Raises UsageError if there is certainly no model.
    """
    if source in EMBEDDED:
        return
    if is_address(source):
        check_address(source)
        raise UsageError(
            f"{source} is the address of a server, which gives vectors and no model",
            "it can be the teacher of kdcli distill --teacher URL --student MODEL; elsewhere, give "
            "a hub id or a directory",
        )
    folder = user_path(source)
    if folder.is_dir():
        if holds_run(folder) and not any((folder / name).exists() for name in MODEL_OR_REPORT):
            raise UsageError(
                f"{source} is an unfinished run and has no model yet",
                "rerun the command that started it, with --resume, or give another model",
            )
        return
    name, _, revision = source.partition("@")
    is_path = source.startswith((".", "/", "~")) or source.endswith("/") or name.count("/") > 1
    if folder.is_file():
        from kdcli.models.files import CONFIG_FILE, FACTS  # It imports torch.

        files = CONFIG_FILE, FACTS
        inside = (above for above in folder.parents if any((above / f).is_file() for f in files))
        raise UsageError(
            f"{source} is a file, and a model is a directory",
            f"give its directory: {next(inside, folder.parent)}",
        )
    if folder.exists() or is_path:
        raise UsageError(
            f"no model directory {source}{near_path(source)}",
            "give a hub id, a directory with config.json, or 'demo'",
        )
    if not constants.HF_HUB_OFFLINE or not HUB_NAME.fullmatch(name):
        return
    if cached_file(name, "config.json", revision or None) is None:
        raise UsageError(
            f"model '{source}' was found neither as a directory nor in the Hugging Face cache"
            f"{near_path(source, EMBEDDED)}",
            "check the name, or use a local directory or 'demo'; HF_HUB_OFFLINE=1 forbids asking "
            "the hub",
        )


def sizes_on_disk(source: str) -> ModelShape | None:
    """Read the sizes of a model in a directory or inside the package from its config.json.

    Returns None for other models, and for models that name their sizes differently from BERT.
    Raises UsageError if config.json cannot be read.
    """
    embedded = Path(__file__).parents[1] / "data"
    folder = embedded / EMBEDDED[source] if source in EMBEDDED else user_path(source)
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = [config.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    return ModelShape(*sizes)
