"""Bad command lines, made from the declared options.

Each must be refused with one message, before anything is written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.kills import Words, commands, state
from tools.faults.process import OUTPUT, kdcli

NUMBERS = ["-1", "0", "nan", "inf", "-inf", "1e400", "9" * 30, "-" + "9" * 30]
NUMBERS += ["9" * 5000, "1e-400", "0x10", "1,5", "1_0"]
WORDS = ["", " ", "x", "x" * 100_000, "true", "[]"]
WORDS += ["\n", "\x1b[31mred", "[red]", ":a:", "\u202e", "\u00e9" * 300, "--json"]
# A command must not be able to write to a path outside the case's directory.
PATHS = [
    "/proc/1/mem",
    "/proc",
    "a" * 300,
    "~nosuchuser/x",
    "file/below",
    "loop/x",
    ".",
    "a\nb",
    "-",
    "file",
]
TREES = ["{}", "[]", "{a: 1}", "[1, [2]]", "null", "{'': null}", "[" * 200 + "]" * 200]
TREES += ["!!python/name:os.system x", "a: b: c"]
BAD = {
    int: NUMBERS + WORDS[:6],
    float: NUMBERS + WORDS[:6],
    Path: PATHS + WORDS,
    str: WORDS + NUMBERS[:6] + PATHS,
}
NOT_NUMBERS = {"nan", "0x10", "1,5", "", " ", "x", "true", "[]", "x" * 100_000}
WRONG = {
    int: NOT_NUMBERS | {"inf", "-inf", "1e400", "1e-400"},
    float: NOT_NUMBERS,
}
"""Words that are not valid for any option of a type. A command that accepts them has a fault."""
LENGTHS = ("epochs", "steps", "min_runs", "min_seconds", "copies", "resamples")
"""Endings of recipe keys that make a run longer."""

Line = tuple[Words, str]
"""A command line and how it may end: `refused`, or `any` of the documented exit codes."""


class Parameter(Protocol):
    """The attributes of typer's options and arguments that the cases depend on."""

    bare_type: type
    param_type_name: str
    opts: list[str]
    is_flag: bool
    multiple: bool


def verbs(material: Path) -> dict[str, Words]:
    """Return a complete and short command, without `-o`, for each verb."""
    writing = commands(material)
    names = "finetune distill prune cotrain cotrain-task chain evaluate export apply compact"
    words: dict[str, Words] = {name: writing[name] for name in names.split()}
    once = "--set measure.min_runs=1 --set measure.min_seconds=0"
    mask = writing["apply"][2]
    return words | {
        "benchmark": ["benchmark", material / "teacher", *once.split()],
        "info": ["mask", "info", mask],
        "diff": ["mask", "diff", mask, mask],
        "show": ["recipes", "show", "small"],
        "ls": ["recipes", "ls"],
        "validate": ["recipes", "validate"],
    }


def parameters_of(words: Words) -> list[Parameter]:
    """Return the options and arguments that a command declares."""
    import typer

    from kdcli.cli import app

    command: object = typer.main.get_command(app)
    for word in words:
        inner = getattr(command, "commands", None)
        if inner is None:
            break
        command = inner[str(word)]
    return list(getattr(command, "params", ()))


@functools.cache
def lines(material: Path) -> tuple[list[Line], list[Line]]:
    """Return the bad command lines.

    Returns:
        Lines with bad values for each option and with contradictions, and lines with bad values for
        each recipe key.
    """
    of_options: list[Line] = []
    of_keys: list[Line] = []
    for verb, words in verbs(material).items():
        for parameter in parameters_of(words):
            of_options += _lines_of_option(words, parameter)
        of_options += [(line, "refused") for line in _unknown(words)]
        of_keys += _lines_of_keys(verb, words)
    return of_options, of_keys


def _lines_of_option(words: Words, option: Parameter) -> Iterator[Line]:
    """Yield lines with bad values for an option or argument."""
    kind = option.bare_type if option.bare_type in BAD else str
    if option.param_type_name == "argument":
        # The bad value replaces the first argument.
        first = 2 if words[0] in ("mask", "recipes") else 1
        for bad in BAD[kind]:
            yield [*words[:first], bad, *words[first + 1 :]], "any"
        return
    name = max(option.opts, key=len)
    if option.is_flag:
        yield [*words, f"{name}=1"], "refused"
        yield [*words, name, name], "any"
        return
    for bad in BAD[kind]:
        yield [*words, f"{name}={bad}"], "refused" if bad in WRONG.get(kind, ()) else "any"
    yield [*words, name], "refused"
    if not option.multiple and kind is int:
        yield [*words, f"{name}=1", f"{name}=x"], "refused"


def _lines_of_keys(verb: str, words: Words) -> Iterator[Line]:
    """Yield lines that set each key of the verb's recipe to bad values with `--set`."""
    from kdcli.recipe.resolve import leaf_keys, recipe_models

    if (name := {"chain": "distill", "cotrain-task": "cotrain"}.get(verb, verb)) not in (
        models := recipe_models()
    ):
        return
    for key in leaf_keys(models[name]):
        for bad in [*NUMBERS[:8], *TREES, *WORDS[:6], "1.5", "-0.5"]:
            # These values are valid, but the run would take too long.
            is_long = key.endswith(LENGTHS) and bad[:1] == "9"
            if not is_long and (key, bad) != ("measure.latency", "true"):
                yield [*words, "--set", f"{key}={bad}"], "any"
        yield [*words, "--set", f"{key}x=1"], "refused"
        yield [*words, "--set", key], "refused"


def _unknown(words: Words) -> Iterator[Words]:
    """Yield lines with unknown or contradictory options, and with unknown commands."""
    for bad in (
        "--no-such",
        "--",
        "-",
        "-Z",
        "--set",
        "--set=x",
        "--set==1",
        "--set=.=1",
        "--set=a.b.c=1",
        "--=1",
    ):
        yield [*words, bad, *(["x"] if bad == "--" else [])] if bad != "-" else [*words, "-Z"]
    yield [*words, "--resume", "--overwrite"]
    yield [*words, "--epochs", "1", "--max-steps", "1"]
    yield [words[0], "no-such-verb", "--no-such"]
    yield [f"{words[0]}x", *words[1:]]


def refused(case: Case) -> None:
    """Run a bad command line.

    It must end with a documented exit code and one message, and a usage error must not write files.
    """
    words, ends = case.rng.choice(lines(case.material)[case.number % 2])
    (case.folder / "file").write_text("not a directory")
    (case.folder / "loop").symlink_to("loop")
    has_directory = any(str(word).startswith("--output") for word in words)
    takes_none = words[0] == "recipes" or words[1] in ("info", "diff")
    output = [] if has_directory or takes_none else ["-o", "out"]
    before = state(case.folder)
    cache = {"KDCLI_CACHE": str(case.material / "cache")}
    done = kdcli(case.folder, *words, *output, environment=cache)
    try:
        done.check(*([2] if ends == "refused" else []))
        files = state(case.folder).items()
        after = {name: content for name, content in files if not name.startswith(OUTPUT)}
        if done.code == 2 and after != before:
            names = ", ".join(sorted(after.keys() - before.keys()))
            raise Fault(f"refused, but wrote {names[:200]}")
        if any(path.name.endswith(".part") for path in case.folder.rglob("*")):
            raise Fault("left a half-written file")
    except Fault as fault:
        last_words = " ".join(_short(str(word)) for word in words[-2:])
        raise Fault(f"{words[0]} ... {last_words}: {fault}") from None


def _short(word: str) -> str:
    """Return a word for a message. A long word keeps its beginning, its end and its length."""
    return repr(word) if len(word) < 60 else f"{word[:10]}...{word[-25:]} ({len(word)})"


KINDS = [Kind("words", 1600, refused, chunk=8, wall=75)]
