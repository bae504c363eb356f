"""kdcli: make Hugging Face encoders small and fast, and prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdcli.sparse.load import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Bring `kdcli.load` in when it is first asked for: it loads torch, which `kdcli --help` must not wait for."""
    if name == "load":
        from kdcli.sparse.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
