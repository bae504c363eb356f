"""Bad command lines, made from the options themselves: each must be refused in one message, with
nothing written."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.kills import Words, commands, state
from tools.faults.process import kdcli

NUMBERS = ["-1", "0", "nan", "inf", "-inf", "1e400", "9" * 30, "-" + "9" * 30]
NUMBERS += ["9" * 5000, "1e-400", "0x10", "1,5", "1_0"]
WORDS = ["", " ", "x", "x" * 100_000, "true", "[]"]
WORDS += ["\n", "\x1b[31mred", "[red]", ":a:", "\u202e", "\u00e9" * 300, "--json"]
# None that a command may write to outside the case's directory.
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
WRONG = {
    int: {
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e-400",
        "0x10",
        "1,5",
        "",
        " ",
        "x",
        "true",
        "[]",
        "x" * 100_000,
    },
    float: {"nan", "0x10", "1,5", "", " ", "x", "true", "[]", "x" * 100_000},
}
"""Words that no option of this type can mean: exit 0 would be a fault."""
LENGTHS = ("epochs", "steps", "min_runs", "min_seconds", "copies", "resamples")

Line = tuple[Words, str]  # words, and how they may end: `refused`, or `any` of the promised codes


def verbs(material: Path) -> dict[str, Words]:
    """Verb -> the words of a whole and short command, without `-o`."""
    found = commands(material)
    wanted = "finetune distill prune cotrain cotrain-task chain evaluate export apply compact"
    own: dict[str, Words] = {name: found[name] for name in wanted.split()}
    once = "--set measure.min_runs=1 --set measure.min_seconds=0"
    own["benchmark"] = ["benchmark", material / "teacher", *once.split()]
    own["info"] = ["mask", "info", found["apply"][2]]
    own["diff"] = ["mask", "diff", found["apply"][2], found["apply"][2]]
    own |= {
        "show": ["recipes", "show", "small"],
        "ls": ["recipes", "ls"],
        "validate": ["recipes", "validate"],
    }
    return own


def options(words: Words) -> list[Any]:
    """The options and arguments that a verb declares."""
    import typer

    from kdcli.cli import app

    command: Any = typer.main.get_command(app)
    for word in words:
        if (inner := getattr(command, "commands", None)) is None:
            break
        command = inner[str(word)]
    return list(command.params)


@functools.cache
def lines(material: Path) -> tuple[list[Line], list[Line]]:
    """Every option of every verb times what is bad for its type, contradictions; and every recipe
    key below `--set`."""
    of_options: list[Line] = []
    of_keys: list[Line] = []
    for verb, words in verbs(material).items():
        for option in options(words):
            of_options += _of_option(words, option)
        of_options += [(line, "refused") for line in _unknown(words)]
        of_keys += _of_keys(verb, words)
    return of_options, of_keys


def _of_option(words: Words, option: Any) -> Iterator[Line]:
    kind = option.bare_type if option.bare_type in BAD else str
    if option.param_type_name == "argument":
        # In the place of the first one, and one too many.
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


def _of_keys(verb: str, words: Words) -> Iterator[Line]:
    """Values below `--set` for every key of the verb's recipe."""
    from kdcli.recipe.resolve import leaf_keys, recipe_models

    if (kind := {"chain": "distill-task"}.get(verb, verb)) not in recipe_models():
        return
    for key in leaf_keys(recipe_models()[kind]):
        for bad in [*NUMBERS[:8], *TREES, *WORDS[:6], "1.5", "-0.5"]:
            # A longer run than the command's own is no fault.
            longer = (key.endswith(LENGTHS) and bad[:1] == "9") or (key, bad) == (
                "measure.latency",
                "true",
            )
            if not longer:
                yield [*words, "--set", f"{key}={bad}"], "any"
        yield [*words, "--set", f"{key}x=1"], "refused"
        yield [*words, "--set", key], "refused"


def _unknown(words: Words) -> Iterator[Words]:
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
    """One bad line: a promised code, one message, and the directory as it was unless a run
    began."""
    words, ends = case.rng.choice(lines(case.material)[case.number % 2])
    (case.folder / "file").write_text("not a directory")
    (case.folder / "loop").symlink_to("loop")
    nowhere = (
        words[0] == "recipes"
        or words[1] in ("info", "diff")
        or any(str(w)[:8] == "--output" for w in words)
    )
    where = [] if nowhere else ["-o", "out"]
    shown = " ".join(
        repr(w) if len(w) < 60 else f"{w[:10]}...{w[-25:]} ({len(w)})" for w in map(str, words[-2:])
    )
    before = state(case.folder)
    cache = {"KDCLI_CACHE": str(case.material / "cache")}
    done = kdcli(case.folder, *words, *where, environment=cache)
    try:
        done.check(*([2] if ends == "refused" else []))
        after = {k: v for k, v in state(case.folder).items() if not k.startswith("said-")}
        if done.code == 2 and after != before:
            raise Fault(
                f"refused, but wrote {', '.join(sorted(after.keys() - before.keys()))[:200]}"
            )
        if any(path.name.endswith(".part") for path in case.folder.rglob("*")):
            raise Fault("left a half-written file")
    except Fault as fault:
        raise Fault(f"{words[0]} ... {shown}: {fault}") from None


KINDS = [Kind("words", 1600, refused, chunk=8, wall=75)]
