"""Experiment trackers: `--report-to`."""

from pathlib import Path

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from kdcli.engine.session import Session
from kdcli.errors import UsageError, did_you_mean


def check_tracker(name: str) -> None:
    """Check the value of `--report-to`.

    Args:
        name: `none`, `all`, or a tracker of accelerate.

    Raises:
        UsageError: the tracker is unknown or not installed.
    """
    known = sorted(LOGGER_TYPE_TO_CLASS)
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    available = f"installed: {', '.join(installed) or 'none'}"
    if name not in (*known, "none", "all"):
        raise UsageError(
            f"unknown tracker '{name}' (--report-to){did_you_mean(name, known)}",
            f"allowed: none, all, {', '.join(known)}; {available}",
        )
    if name == "all" and not installed:
        raise UsageError(
            "--report-to all: no tracker is installed", f"install one of {', '.join(known)}"
        )
    if name in known and name not in installed:
        raise UsageError(
            f"--report-to {name}: it is not installed",
            f"pip install {name.replace('_', '-')}; {available}",
        )


def track(session: Session, folder: Path) -> None:
    """Start the tracker of `--report-to`. Its files go to `logs/` in the run directory."""
    session.accelerator.project_configuration.logging_dir = str(folder / "logs")
    session.accelerator.init_trackers("kdcli")
