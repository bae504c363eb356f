"""Run the blocks of documentation pages in this process; tests/test_documented_examples.py starts
it inside a copy of the repository.

    python tests/documented.py PAGE.md ...
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"Save this file\s+as\s+`([^`]+)`:\s*$")
ROW = re.compile(r"Add this row to `(\w+)` in\s+`([^`]+)`:\s*$")
EMPTY = re.compile(r"With an empty `([^`]+)`")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """List a page's blocks: the text before each one, its language and its content."""
    text, found, end = page.read_text("utf-8"), [], 0
    for block in BLOCK.finditer(text):
        found.append((text[end : block.start()].rstrip(), block[1], block[2]))
        end = block.end()
    return found


def kdcli(arguments: list[str]) -> None:
    """Run a command in this process, which has imported everything; raise if it fails."""
    from kdcli.cli import main

    sys.argv = ["kdcli", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"kdcli {shlex.join(arguments)} exits with {ended.code}") from None


def run_shell(content: str, *, only_check: bool) -> None:
    """Run each line of a shell block; raise if one fails.

    `only_check` runs `make` with -n, and pytest collects the tests that the page names."""
    for line in content.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["kdcli"]:
            kdcli(words[1:])
        elif words[:3] == [".venv/bin/python", "-m", "pytest"]:
            more = ["--collect-only"] if only_check else []
            cache = os.environ["KDCLI_CACHE"]  # The tests' configuration chooses another one.
            code = pytest.main([*words[3:], "-q", "-p", "no:cacheprovider", *more])
            os.environ["KDCLI_CACHE"] = cache
            if code:
                raise RuntimeError(f"{line} exits with {code}")
        elif words:
            env = os.environ | ({"MAKEFLAGS": "n"} if only_check else {})
            subprocess.run(["bash", "-c", line], check=True, env=env)


def write_file(path: Path, content: str) -> None:
    """Write a new file of the package; raise if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(content)


def add_row(name: str, path: Path, row: str) -> None:
    """Put a row at the beginning of a mapping in a module; raise if the module has no such
    mapping."""
    source = path.read_text("utf-8")
    (opening,) = re.findall(rf"^{name}\b.*{{$", source, re.MULTILINE)
    path.write_text(source.replace(opening, f"{opening}\n{row}"), "utf-8")


def to_run(page: Path) -> list[tuple[str, str, str]]:
    """Write the files that a page documents; list its other blocks: heading, language, content."""
    others, heading = [], ""
    for before, language, content in blocks(page):
        heading = (re.findall(r"^## (.*)$", before, re.MULTILINE) or [heading])[-1]
        if empty := EMPTY.search(before):
            write_file(Path(empty[1]), "")
        if file := FILE.search(before):
            write_file(Path(file[1]), content)
        elif row := ROW.search(before):
            add_row(row[1], Path(row[2]), content)
        else:
            others.append((heading, language, content))
    return others


def run_pages(pages: list[Path], prepare: Callable[[], None] | None = None) -> None:
    """Write the files of all pages, call `prepare`, then run the other blocks in order."""
    # The files come first: a module that was imported without a row would never see it.
    work = [(page, to_run(page)) for page in pages]
    if prepare is not None:
        prepare()
    for page, others in work:
        names: dict[str, object] = {"__name__": "__main__"}
        for heading, language, content in others:
            print(f"--- {page.name}\n{content}", flush=True)
            if language == "python":
                exec(compile(content, page.name, "exec"), names)
            elif language == "sh":
                # A developer's checks take minutes, and they run in every `make test` anyway.
                run_shell(content, only_check=heading == "Before you commit")
            elif language != "text":
                raise ValueError(f"{page.name}: a block of {language!r} is neither run nor saved")


def shorten_demo() -> None:
    """Shorten the demo's text and tasks: to read all of them takes longer than the documented
    runs."""
    from kdcli.data import demo

    demo.DOCUMENTS.update(train=600, validation=300)
    demo.EXAMPLES = 64


if __name__ == "__main__":
    run_pages([Path(name) for name in sys.argv[1:]], prepare=shorten_demo)
