"""Write the block that repeats a run: the command, and what its result depends on."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kdcli.disk import is_path
from kdcli.models.source import is_address
from kdcli.report.schema import Report
from kdcli.report.sections.evaluations import set_name

PRICE = "--price-per-hour"
LEFT_OUT = "# Without directories of local files and access keys in addresses: give your own."


def repeat_command(verb: str, command_line: str | None, *, public: bool = False) -> str:
    """Return the command that repeats a run: as it was typed, or with its recipe.

    Args:
        verb: The verb.
        command_line: The command as it was typed; None if the run was started from Python.
        public: Whether anybody may read the command, as in a model card. It then has no price of
            the machine and no directories of local files; a comment says so.
    """
    if command_line is None:
        return f"kdcli {verb} --recipe recipe.yaml -o NEW_DIRECTORY"
    if not public:
        return command_line
    words: list[str] = []
    for word in shlex.split(command_line):
        option, equals, _ = word.partition("=")
        if words and words[-1] == PRICE:
            words.pop()
        elif option != PRICE or not equals:
            words.append(word)
    public_words = [_public(word) for word in words]
    left_out = "" if public_words == words else f"\n{LEFT_OUT}"
    return f"{shlex.join(public_words)}{left_out}"


def _public(word: str) -> str:
    """Return the last part of a path, also after `KEY=`, and any other word unchanged.

    A hub id has one slash. The address of a server or a file loses its user, password and query,
    which may hold a key.
    """
    if is_address(word):
        parts = urlsplit(word)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
    key, equals, value = word.partition("=")
    if equals:
        return f"{key}={_public(value)}"
    is_place = word.startswith((".", "/", "~")) or word.count("/") > 1 or is_path(word)
    return Path(word).name or word if is_place else word


def repeat_block(report: Report) -> str:
    """Return the command, and comments with versions, hashes and the seed.

    A shell can run the whole block.
    """
    command = repeat_command(report.command, report.command_line)
    return "\n".join([command, *(f"# {' '.join(fact.split())}" for fact in _facts(report))])


def _facts(report: Report) -> Iterator[str]:
    yield f"run on {report.created}"
    yield ", ".join(f"{name} {version}" for name, version in report.versions.items())
    machine = [report.environment.get(key) for key in ("cpu", "os")]
    python = report.environment.get("python")
    yield ", ".join(
        [*(str(fact) for fact in machine if fact), *([f"Python {python}"] if python else [])]
    )
    seed = _seed(report)
    if seed is not None:
        yield f"seed {seed}"
    for name, version in report.data_versions.items():
        yield f"data {name}: {version}"
    rows = {
        f"{e.n:,} rows of {set_name(e.task, e.set)} ({e.split})": e.rows_sha256
        for e in report.evaluations
        if e.rows_sha256 is not None
    }
    for name, digest in rows.items():
        yield f"{name}: sha256 {digest}"
    for name, card in report.cards.items():
        if card.sha256 is not None:
            revision = f", revision {card.revision}" if card.revision else ""
            yield f"weights of {name}: sha256 {card.sha256}{revision}"


def _seed(report: Report) -> object:
    """Return the seed of the chosen run, of the recipe, or of its training."""
    if report.selection is not None:
        return report.selection.seed
    training = report.recipe.get("train")
    inner = training.get("seed") if isinstance(training, dict) else None
    return report.recipe.get("seed", inner)
