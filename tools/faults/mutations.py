"""Change the code in one place at a time and check that a test fails.

    python -m tools.faults.mutations [--count 60] [--seed 0] [--jobs 1] [--near]
    python -m tools.faults.mutations --check

The changes affect formulas, schedules, recipe values and exit codes. The tests run in a copy of the
repository: first the tests of the changed file, then all tests. Prints the changes that no test
noticed, and exits with 1 if they are more than one in twenty.

`--check` runs no tests. It checks that the files and tests named here exist, and that every
possible change gives a file that can still be parsed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from tools.faults.material import ROOT, code_hash


@dataclass(frozen=True)
class Share:
    """A part of the code that is changed.

    Attributes:
        files: Glob patterns of its files.
        per_sixty: How many of sixty changes are in this part.
        tests: The tests that run first.
    """

    files: tuple[str, ...]
    per_sixty: int
    tests: tuple[str, ...]

    @property
    def paths(self) -> list[Path]:
        """The files that the patterns match, without `__init__.py`."""
        paths = {path for pattern in self.files for path in ROOT.glob(pattern)}
        return sorted(path for path in paths if path.name != "__init__.py")


SHARES = {
    "losses": Share(("kdcli/losses/*.py",), 18, ("tests/losses", "tests/verbs/test_distill.py")),
    "pruners": Share(("kdcli/pruners/*.py",), 10, ("tests/pruners", "tests/verbs/test_prune.py")),
    "metrics": Share(("kdcli/metrics/*.py",), 8, ("tests/metrics",)),
    "models": Share(
        ("kdcli/models/reduce.py", "kdcli/deploy/sparse/mask_file.py"),
        4,
        ("tests/models", "tests/deploy"),
    ),
    "schedules": Share(
        (*(f"kdcli/engine/{name}.py" for name in ("train", "step", "launch")), "kdcli/types.py"),
        8,
        ("tests/engine",),
    ),
    "recipes": Share(("recipes/*/*.yaml",), 8, ("tests/recipe", "tests/pruners", "tests/losses")),
    "codes": Share(
        ("kdcli/errors.py",),
        4,
        ("tests/test_project.py", "tests/test_cli.py", "tests/verbs/test_evaluate.py"),
    ),
}
OTHER = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.Pow: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
}
TURNED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
PAIRS = (
    "mean sum, log exp, sqrt square, max min, softmax log_softmax, ceil floor, argmax argmin, abs "
    "neg, sigmoid tanh"
)
CALLS = dict(pair.split() for pair in PAIRS.split(", "))
CALLS |= {now: was for was, now in CALLS.items()}
UNCHANGED = "unchanged"
"""Key for the result of the tests without any change."""


@dataclass(frozen=True)
class Mutation:
    """A change that replaces the bytes `begin` to `end` of a file, from `was` to `now`."""

    share: str
    path: str
    line: int
    begin: int
    end: int
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.was!r} -> {self.now!r}"

    def apply(self, data: bytes) -> bytes:
        """Return the file's content with the change."""
        return data[: self.begin] + self.now.encode() + data[self.end :]


def draw(count: int, seed: int) -> list[Mutation]:
    """Draw changes at random, the same ones for the same seed and code.

    The files of a share are equally likely, whatever their size.
    """
    rng = random.Random(f"mutations {seed}")
    drawn: list[Mutation] = []
    for name, share in SHARES.items():
        by_file = {path: list(_possible(name, path)) for path in share.paths}
        wanted = len(drawn) + round(share.per_sixty * count / 60)
        while any(by_file.values()) and len(drawn) < wanted:
            path = rng.choice([path for path, left in by_file.items() if left])
            drawn.append(by_file[path].pop(rng.randrange(len(by_file[path]))))
    return drawn


def problems() -> list[str]:
    """Describe what does not fit: patterns and tests that do not exist, and impossible changes."""
    messages = []
    for name, share in SHARES.items():
        messages += [f"{name}: no file matches {p}" for p in share.files if not any(ROOT.glob(p))]
        missing = [test for test in share.tests if not (ROOT / test).exists()]
        messages += [f"{name}: there is no {test}" for test in missing]
        changes = [change for path in share.paths for change in _possible(name, path)]
        if len(changes) < share.per_sixty:
            messages.append(f"{name}: only {len(changes)} changes are possible")
        messages += [f"{change}: {why}" for change in changes if (why := _misfit(change))]
    return messages


def _misfit(mutation: Mutation) -> str | None:
    """Return why a change cannot apply, or None."""
    data = (ROOT / mutation.path).read_bytes()
    if data[mutation.begin : mutation.end].decode() != mutation.was:
        return "the file has another text at this place"
    text = mutation.apply(data).decode()
    try:
        yaml.safe_load(text) if mutation.path.endswith(".yaml") else ast.parse(text)
    except (SyntaxError, yaml.YAMLError) as error:
        return f"the changed file cannot be parsed: {error}"
    return None


def _possible(share: str, path: Path) -> Iterator[Mutation]:
    """Yield the changes that can be made to a file."""
    data, name = path.read_bytes(), str(path.relative_to(ROOT))
    if path.suffix == ".yaml":
        for match in re.finditer(
            rb"^(?!verb|#)\s*[\w-]+: ?(-?[\d.]+(e-?\d+)?|true|false)(?=\s|$)", data, re.MULTILINE
        ):
            was = match[1].decode()
            now = {"true": "false", "false": "true"}.get(was) or f"{float(was) * 2:g}"
            yield Mutation(
                share, name, data[: match.start(1)].count(b"\n") + 1, *match.span(1), was, now
            )
        return
    lines = [0]
    for line in data.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for begin_line, begin, end_line, end, now in _changes(
        ast.parse(data), data.decode().splitlines()
    ):
        first, last = lines[begin_line - 1] + begin, lines[end_line - 1] + end
        was = data[first:last].decode()
        if was != now:
            yield Mutation(share, name, begin_line, first, last, was, now)


def _changes(tree: ast.Module, text: list[str]) -> Iterator[tuple[int, int, int, int, str]]:
    """Yield the changes of numbers, signs, operators, comparisons, `not`, booleans and functions.

    Args:
        tree: The parsed module.
        text: Its lines.

    Yields:
        First line, column in bytes, last line, column in bytes, and the new text.
    """
    skipped = {n for outer in ast.walk(tree) for n in _not_code(outer)}
    for node in ast.walk(tree):
        if node in skipped or not hasattr(node, "lineno"):
            continue
        place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield *place, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield *place, repr(node.value * 2 if abs(node.value) > 1 else node.value + 1)
        elif isinstance(node, ast.Attribute) and node.attr in CALLS:
            yield place[2], place[3] - len(node.attr), place[2], place[3], CALLS[node.attr]
        elif isinstance(node, ast.BinOp) and not isinstance(
            node.left, ast.Constant | ast.JoinedStr
        ):
            yield from _between(node.left, node.right, OTHER.get(type(node.op)), text)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _between(node.left, node.comparators[0], TURNED.get(type(node.ops[0])), text)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield place[0], place[1], place[0], place[1] + 1, "+"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield place[0], place[1], place[0], place[1] + 3, ""


def _between(
    left: ast.expr, right: ast.expr, now: str | None, text: list[str]
) -> Iterator[tuple[int, int, int, int, str]]:
    """Yield the change of the operator between two expressions on one line."""
    if now and left.end_lineno == right.lineno and left.end_col_offset is not None:
        line = text[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        if match := re.fullmatch(r"(\)*\s*)([-+*/%@<>=!]+)(\s*\(*)", line):
            begin = left.end_col_offset + match.start(2)
            yield right.lineno, begin, right.lineno, begin + len(match[2]), now


def _not_code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are not part of a computation: annotations, decorators, messages, limits
    of settings, and ranges of loops."""
    for name in ("annotation", "returns"):
        if inner := getattr(node, name, None):
            yield from ast.walk(inner)
    for decorator in getattr(node, "decorator_list", ()):
        yield from ast.walk(decorator)
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    limit = isinstance(node, ast.keyword) and node.arg in ("ge", "gt", "le", "lt")
    if (
        limit
        or called in ("range", "log")
        or isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise)
    ):
        yield from ast.walk(node)


class Copy:
    """A copy of the repository, in which one change at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)  # with its mode

    def first_failure(self, tests: Sequence[str]) -> str | None:
        """Run tests in the copy and return the name of the first that fails, or None."""
        options = ["-q", "-x", "--timeout", "600", "-p", "no:cacheprovider"]
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=3600,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "time limit"
        if done.returncode == 0:
            return None
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return failed[0] if failed else f"exit {done.returncode}: {done.stdout[-300:]}"

    def failure_with(self, mutation: Mutation, *, all_tests: bool) -> str | None:
        """Return the name of a test that fails with a change, or None.

        Args:
            mutation: The change.
            all_tests: Run all tests if the tests of the share pass.
        """
        path = self.folder / mutation.path
        data = path.read_bytes()
        path.write_bytes(mutation.apply(data))
        try:
            failure = self.first_failure(SHARES[mutation.share].tests)
            return self.first_failure(["tests"]) if failure is None and all_tests else failure
        finally:
            path.write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--near", action="store_true", help="run only the tests of the changed file, not all tests"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that all changes can be made"
    )
    options = parser.parse_args()
    if messages := problems():
        print("\n".join(messages))
        return 1
    if options.check:
        print("all changes can be made")
        return 0
    os.nice(10)
    drawn = draw(options.count, options.seed)
    name = f"mutations-{code_hash()}-{options.seed}{'-near' * options.near}.jsonl"
    failures = Failures(ROOT / "runs" / "faults" / name)
    with tempfile.TemporaryDirectory(prefix="kdcli-mutations-") as aside:
        copies = [Copy(Path(aside) / str(n)) for n in range(options.jobs)]
        if UNCHANGED not in failures.by_key:
            near = dict.fromkeys(test for share in SHARES.values() for test in share.tests)
            if failure := copies[0].first_failure(list(near)):
                print(f"{failure} fails without any change", file=sys.stderr)
                return 1
            failures.add(UNCHANGED, None)

        def test(mutation: Mutation) -> None:
            key = json.dumps(asdict(mutation))
            if key in failures.by_key:
                return
            copy = copies.pop()
            failure = copy.failure_with(mutation, all_tests=not options.near)
            copies.append(copy)
            failures.add(key, failure)
            print(mutation, "->", failure or "SURVIVED", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(test, drawn))
    survivors = [m for m in drawn if failures.by_key[json.dumps(asdict(m))] is None]
    print(f"\n{len(drawn) - len(survivors)} of {len(drawn)} changes are noticed")
    for mutation in survivors:
        print("survived:", mutation)
    return len(survivors) > len(drawn) // 20


class Failures:
    """The test that each change makes fail, kept in a file that a later call continues.

    Attributes:
        by_key: A change as JSON -> the name of the test, or None if no test fails.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self.by_key: dict[str, str | None] = dict(json.loads(line) for line in lines)

    def add(self, key: str, failure: str | None) -> None:
        """Add a result and write it to the file."""
        self.by_key[key] = failure
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, failure]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
