"""kdcli: make Hugging Face encoders small and fast, and prove it."""

from __future__ import annotations

import importlib
from typing import Any

from kdcli.version import __version__

VERBS = (
    "distill",
    "prune",
    "cotrain",
    "finetune",
    "evaluate",
    "benchmark",
    "export",
    "trim",
    "adapt",
    "compress",
    "push",
)
"""The verbs that are functions too; their signatures stand in `__init__.pyi`."""

__all__ = ["__version__", "load", "read", *VERBS]


def __getattr__(name: str) -> Any:
    """Bring a function in when it is first asked for: it loads what `kdcli --help` must not wait
    for."""
    if name == "load":
        from kdcli.deploy.usable import load

        return load
    if name == "read":
        return importlib.import_module("kdcli.cli.python").read
    if name in VERBS:
        return importlib.import_module("kdcli.cli.python").function(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
