"""The version of the code that runs, with its commit in a checkout, and its extras."""

import functools
import importlib.metadata
import subprocess
from pathlib import Path

try:
    __version__ = importlib.metadata.version("kdcli")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0.dev0"  # a folder that is not installed


@functools.cache
def full_version() -> str:
    """Return the version that runs: `0.3.0`, or `0.3.1.dev5+g1a2b3c4d` between releases.

    In a checkout, the commit is the present one, with `.dirty` if files differ from it.
    """
    commit = _commit_of_checkout()
    return f"{__version__.split('+')[0]}+g{commit}" if commit else __version__


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages, because kdcli itself is not on PyPI.
    """
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("kdcli") or []
    except importlib.metadata.PackageNotFoundError:
        return f"install the packages of the extra '{extra}' in kdcli's pyproject.toml"
    of_extras = [one for one in map(Requirement, declared) if "extra" in str(one.marker)]
    names = (one.name for one in of_extras if one.marker and one.marker.evaluate({"extra": extra}))
    return f"pip install {' '.join(names)}"


def _commit_of_checkout() -> str | None:
    root = Path(__file__).parents[1]
    # An installed package may lie inside somebody else's checkout.
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=.dirty"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
