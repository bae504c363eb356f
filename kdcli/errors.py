"""Define the errors that a user can cause, each with its exit code.

A message says what was given, what is allowed and what to do. Only `kdcli.cli` prints these errors.
Any other exception is a bug (exit code 1).
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

LONG_WORD = re.compile(r"\S{1000,}")  # longer than any name or path that a user can recognise

TRACEBACK = "Traceback (most recent call last):"

MAX_CHARACTERS = 10_000  # maximum length of a message

OF_MACHINE = ("EROFS", "EIO", "ENOSPC", "EDQUOT", "ENFILE", "EMFILE", "ENOMEM")

# In the messages of PyTorch and onnxruntime, across versions and devices.
OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|Failed to allocate memory|bad_alloc"
)

ITEM = re.compile(r"\[(\d+)\]\.?")
"""The index of a list's item in a dotted key."""
PROBLEMS = {"missing": "is missing", "extra_forbidden": "is unknown"}
WORDS = {
    "Input should be": "must be",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    "a valid array": "a list",
    "a valid dictionary": "a mapping of keys",
    "a dictionary": "a mapping of keys",
    "a valid tuple": "a list",
    "an object": "a mapping of keys",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Pydantic's words in messages, and kdcli's."""


def shortened(text: str, limit: int) -> str:
    """Cut a text after `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def one_line(error: BaseException) -> str:
    """Return a library error's message on one line."""
    return " ".join(str(error).split())


def first_problem(error: ValidationError, values: object) -> str:
    """Return the first problem that pydantic found in the values of a JSON file, with its key."""
    problem = error.errors(include_url=False)[0]
    key, text = key_of(problem["loc"], values), PROBLEMS.get(problem["type"]) or reason(problem)
    if problem["type"] == "missing":
        last = problem["loc"][-1]
        key += f"[{last}]" if isinstance(last, int) else f".{last}"
        key = key.removeprefix(".")
    text = text.replace("a mapping of keys", "a JSON object")
    if text.startswith("must "):
        length = problem.get("ctx", {}).get("actual_length")
        text += f", got {length or shortened(repr(problem['input']), 60)}"
    if not key:
        return text
    return f"{in_words(key)}{' ' if text.startswith(('must ', 'is ')) else ': '}{text}"


def reason(problem: ErrorDetails) -> str:
    """Return pydantic's explanation of a wrong value in the form `must be ...`."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = re.sub(" or (an )?instance of .*|, unable to .*|, got a number .*", "", message)
    message = re.sub(
        r"\w+ should (have .*? (items?|characters?))( after .*)?$", r"must \1", message
    )
    for of_pydantic, own in WORDS.items():
        message = message.replace(of_pydantic, own)
    return f"{message[0].lower()}{message[1:]}"


def key_of(location: Sequence[int | str], values: Any) -> str:
    """Return the dotted key of an error's location, such as `student.to` or `sparsity[0]`.

    A location also names the types that pydantic tried. These are not keys.
    """
    key = ""
    for part in location:
        is_item = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if is_item or (isinstance(values, dict) and part in values):
            values = values[part]
            key += f"[{part}]" if is_item else f".{part}"
    return key.removeprefix(".")


def in_words(key: str) -> str:
    """Quote a dotted key: `'train.lr'`, `item 1 of 'sparsity'`, `'trim.rows' in item 2 of 'steps'`.

    Only `--set` with a whole list sets an item.
    """
    first, *rest = ITEM.split(key)
    words = f"'{first}'" if first else "the list"
    for index, inside in zip(rest[::2], rest[1::2], strict=True):
        words = f"item {int(index) + 1} of {words}"
        words = f"'{inside}' in {words}" if inside else words
    return words


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty.

    A line that announces a list ends before the announcement, or with the list's first line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    sentences, found, announcement = lines[0].rpartition(". ")
    if not announcement.endswith(":"):
        return lines[0]
    return f"{sentences}." if found else " ".join(lines[:2])


def last_message(output: str) -> str:
    """Return the message that a failed process ended with.

    With a traceback, it is the line of the exception, without the hint that may follow. Otherwise,
    it is the last line. An empty output gives an empty message.
    """
    _, found, traceback = output.rpartition(TRACEBACK)
    if not found:
        return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    lines = (line for line in traceback.splitlines() if line.strip())
    return next((line.strip() for line in lines if not line[0].isspace()), "")


class KdcliError(Exception):
    """The base class of all errors.

    `message` says what was given and what is allowed. `hint` says what to do, and is printed on its
    own line. `folder` is the directory of the run if its report was written: the run finished, but
    its result misses a limit.
    """

    exit_code = 1

    def __init__(
        self, message: str, hint: str | None = None, *, folder: Path | None = None
    ) -> None:
        message = shortened(
            LONG_WORD.sub(lambda word: shortened(word[0], 200), message), MAX_CHARACTERS
        )
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            # A traceback, which is what a notebook shows, then ends with the hint.
            self.add_note(hint)
        self.folder = folder

    def prefix(self, subject: str, hint: str) -> None:
        """Put a subject in front of the message, and add a hint if the error has none."""
        self.message = f"{subject}: {self.message}"
        self.args = (self.message,)
        if self.hint is None:
            self.hint = hint
            self.add_note(hint)


class UsageError(KdcliError):
    """A command line, recipe, model or data set that cannot be used."""

    exit_code = 2

    def of(self, subject: str, hint: str | None = None) -> UsageError:
        """Return the same error with a subject in front of its message.

        `hint` is appended to the error's own hint.
        """
        return UsageError(
            f"{subject}: {self.message}", "; ".join(h for h in (self.hint, hint) if h) or None
        )


class MachineError(KdcliError):
    """The machine lacks a device, disk space or memory."""

    exit_code = 3


class DivergedError(KdcliError):
    """Training produced a loss or gradient that is not finite."""

    exit_code = 4


class GateError(KdcliError):
    """The result misses a gate (`--min-metric`, `--max-latency-ms`)."""

    exit_code = 5


class UnstableError(KdcliError):
    """A measurement was still unstable under `--strict`."""

    exit_code = 6


class Stopped(KdcliError):
    """The run stopped on request and left a checkpoint to resume from."""

    exit_code = 75


class Interrupted(KdcliError):
    """The run stopped on request before it wrote a checkpoint."""

    exit_code = 130


class ChildFailed(KdcliError):
    """Another process failed and printed the reason. This error only carries its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the process or a device is out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return OUT_OF_MEMORY.search(str(error)) is not None


def raise_machine_error(error: BaseException) -> None:
    """Raise an error of the machine, such as a full memory or disk, again.

    For handlers that take any error of foreign code for a fault of this code.
    """
    number = error.errno if isinstance(error, OSError) else None
    if is_out_of_memory(error) or errno.errorcode.get(number or 0) in OF_MACHINE:
        raise error


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise a UsageError for a name that is not known. `kind` says what it names."""
    if name not in known:
        problem = f"unknown {kind} '{name}'{did_you_mean(name, known)}"
        raise UsageError(problem, f"known: {', '.join(known)}")


def did_you_mean(name: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Return `"; did you mean 'x'?"` for the closest allowed name, or an empty string.

    `prefix` comes before the name, such as the section of a key.
    """
    near = closest(name, allowed)
    return f"; did you mean '{prefix}{near}'?" if near else ""


def closest(name: str, allowed: Iterable[str], alike: float = 0.6) -> str:
    """Return the allowed name closest to `name`, or an empty string.

    `alike` is the least share of equal letters, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(allowed), n=1, cutoff=alike)), "")
