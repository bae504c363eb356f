"""Errors that a user can cause, each with its exit code.

A message states what came, what is allowed and what to do. Only `kdcli.cli` prints them; any other
exception is a bug (exit 1).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LONG_WORD = re.compile(r"\S{1000,}")  # longer than any name or path that a user can recognise

MOST_CHARACTERS = 10_000  # of a message


def shortened(text: str, most: int) -> str:
    """A text for a message, cut where it is longer."""
    return text if len(text) <= most else f"{text[:most]}..."


def one_line(error: BaseException) -> str:
    """The message of an error of a library, on one line."""
    return " ".join(str(error).split())


def first_line(error: BaseException) -> str:
    """The first line of an error's message, else its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class KdcliError(Exception):
    """Base of all errors; `message` states what came and what is allowed, `hint` what to do, on its
    own line."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = shortened(
            LONG_WORD.sub(lambda word: shortened(word[0], 200), message), MOST_CHARACTERS
        )
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(KdcliError):
    """A command line, recipe, model or data set that cannot be used as given."""

    exit_code = 2

    def of(self, what: str, hint: str | None = None) -> UsageError:
        """The same error with its subject in front, and a further hint behind its own."""
        return UsageError(
            f"{what}: {self.message}", "; ".join(h for h in (self.hint, hint) if h) or None
        )


class MachineError(KdcliError):
    """The machine lacks a device, disk space or memory."""

    exit_code = 3


class DivergedError(KdcliError):
    """Training produced a loss or gradient that is not finite."""

    exit_code = 4


class GateError(KdcliError):
    """A gate (`--min-metric`, `--max-latency-ms`) was missed."""

    exit_code = 5


class UnstableError(KdcliError):
    """A measurement stayed unstable under `--strict`."""

    exit_code = 6


class Stopped(KdcliError):
    """Stopped on request, with a checkpoint to go on from."""

    exit_code = 75


class Interrupted(KdcliError):
    """Stopped on request before any checkpoint was written."""

    exit_code = 130


class ChildFailed(KdcliError):
    """Another process failed and printed why; this one only returns its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest allowed name, or an empty string."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
