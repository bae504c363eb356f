"""python -m tools.faults.mutations [--count 60] [--seed 0] [--jobs 1]

Changes formulas, schedules, recipe values and exit codes one at a time in a copy of the tree and
runs the tests there: first those of the changed file, then all. Prints the changes that no test
noticed; exit 1 if more than one in twenty.
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

from tools.faults.material import ROOT, state_of_code

SHARES = {  # what is changed: files, how many of sixty, tests that are run first
    "losses": ("kdcli/losses/*.py", 18, "tests/losses tests/verbs/test_distill.py"),
    "pruners": ("kdcli/pruners/*.py", 10, "tests/pruners tests/verbs/test_prune.py"),
    "metrics": ("kdcli/metrics/*.py", 8, "tests/metrics"),
    "models": (
        "kdcli/models/reduce.py kdcli/deploy/sparse/coding.py",
        4,
        "tests/models tests/deploy",
    ),
    "schedules": (
        "kdcli/engine/train.py kdcli/engine/step.py kdcli/engine/launch.py kdcli/types.py",
        8,
        "tests/engine",
    ),
    "recipes": ("recipes/*/*.yaml", 8, "tests/recipe tests/pruners tests/losses"),
    "codes": (
        "kdcli/errors.py",
        4,
        "tests/test_project.py tests/test_cli.py tests/verbs/test_evaluate.py",
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


@dataclass(frozen=True)
class Mutation:
    """Bytes `begin` to `end` of a file, replaced."""

    share: str
    path: str
    line: int
    begin: int
    end: int
    was: str
    now: str


def mutations(count: int, seed: int) -> list[Mutation]:
    """As many as asked for, the same for the same seed and code; each share's in turn over its
    files."""
    rng, found = random.Random(f"mutations {seed}"), []
    for share, (patterns, of_sixty, _) in SHARES.items():
        paths = sorted(
            p for pattern in patterns.split() for p in ROOT.glob(pattern) if p.name != "__init__.py"
        )
        by_file = {path: list(_possible(share, path)) for path in paths}
        drawn: list[Mutation] = []
        while any(by_file.values()) and len(drawn) < round(of_sixty * count / 60):
            path = rng.choice([p for p, left in by_file.items() if left])
            drawn.append(by_file[path].pop(rng.randrange(len(by_file[path]))))
        found += drawn
    return found


def _possible(share: str, path: Path) -> Iterator[Mutation]:
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
    """Place and new text of every change: a number, a sign, a comparison, `and`, `not`, True, or
    the name of a sum."""
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
    if now and left.end_lineno == right.lineno and left.end_col_offset is not None:
        line = text[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        if match := re.fullmatch(r"(\)*\s*)([-+*/%@<>=!]+)(\s*\(*)", line):
            begin = left.end_col_offset + match.start(2)
            yield right.lineno, begin, right.lineno, begin + len(match[2]), now


def _not_code(node: ast.AST) -> Iterator[ast.AST]:
    """What computes nothing: annotations, decorators, messages, limits of settings, the steps of a
    loop."""
    for name in ("annotation", "returns"):
        if inner := getattr(node, name, None):
            yield from ast.walk(inner)
    for decorator in getattr(node, "decorator_list", ()):
        yield from ast.walk(decorator)
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    limit = isinstance(node, ast.keyword) and node.arg in ("ge", "gt", "le", "lt")
    if (
        limit
        or called in ("range", "Progress.log")
        or isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise)
    ):
        yield from ast.walk(node)


class Copy:
    """A copy of the tree, in which one change at a time is tested."""

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

    def passes(self, tests: Sequence[str]) -> str | None:
        """None where the tests pass here, else the first that fails."""
        there = [test for test in tests if (self.folder / test).exists()]
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--timeout",
            "600",
            "-p",
            "no:cacheprovider",
            *there,
        ]
        how = os.environ | {
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                words,
                cwd=self.folder,
                env=how,
                capture_output=True,
                text=True,
                timeout=3600,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "too late"
        if done.returncode == 0:
            return None
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return failed[0] if failed else f"exit {done.returncode}: {done.stdout[-300:]}"

    def killer(self, mutation: Mutation, *, whole: bool) -> str | None:
        """The test that fails under a change, or None."""
        path = self.folder / mutation.path
        data = path.read_bytes()
        path.write_bytes(data[: mutation.begin] + mutation.now.encode() + data[mutation.end :])
        try:
            killer = self.passes(SHARES[mutation.share][2].split())
            return self.passes(["tests"]) if killer is None and whole else killer
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
        "--near", action="store_true", help="only the tests of the changed file, not all after them"
    )
    given = parser.parse_args()
    os.nice(10)
    chosen = mutations(given.count, given.seed)
    results = (
        ROOT
        / "runs"
        / "faults"
        / f"mutations-{state_of_code()}-{given.seed}{'-near' * given.near}.jsonl"
    )
    results.parent.mkdir(parents=True, exist_ok=True)
    killers = (
        dict(json.loads(line) for line in results.read_text("utf-8").splitlines())
        if results.exists()
        else {}
    )
    with tempfile.TemporaryDirectory(prefix="kdcli-mutations-") as aside:
        copies = [Copy(Path(aside) / str(n)) for n in range(given.jobs)]
        if "unchanged" not in killers:
            near = tuple(
                dict.fromkeys(test for _, _, tests in SHARES.values() for test in tests.split())
            )
            if failed := copies[0].passes(near):
                print(f"without any change {failed} fails", file=sys.stderr)
                return 1
            _keep(results, "unchanged", "")

        def judge(mutation: Mutation) -> None:
            key = json.dumps(asdict(mutation))
            if key in killers:
                return
            copy = copies.pop()
            killers[key] = copy.killer(mutation, whole=not given.near)
            copies.append(copy)
            _keep(results, key, killers[key])
            print(_shown(mutation), "->", killers[key] or "SURVIVED", flush=True)

        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(judge, chosen))
    survivors = [m for m in chosen if killers[json.dumps(asdict(m))] is None]
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} changes are noticed")
    for mutation in survivors:
        print("survived:", _shown(mutation))
    return len(survivors) > len(chosen) // 20


def _shown(mutation: Mutation) -> str:
    return f"{mutation.path}:{mutation.line} {mutation.was!r} -> {mutation.now!r}"


def _keep(results: Path, key: str, killer: str | None) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps([key, killer]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
