"""Run a command and save what it prints as a picture of a terminal.

    python -m tools.record -o docs/images/demo.svg -- kdcli compress demo-classifier ...

The picture has the command, and the text of stdout and stderr in the order of the lines. `--first`
and `--last` shorten a long text to its first and last lines, with a line between them that says how
many are left out. Exits with the command's code, and writes no picture if the command fails.

The picture names no font on the internet. Its letters are in the reader's own monospaced font.
"""

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 92
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The rules with which rich's pictures load a font from the internet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, metavar="N")
    parser.add_argument("--last", type=int, metavar="N")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    done = subprocess.run(
        options.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": str(COLUMNS)},
        check=False,
    )
    print(done.stdout, end="")
    if done.returncode:
        sys.exit(done.returncode)
    text = shortened(done.stdout.rstrip("\n"), options.first, options.last)
    options.output.write_text(picture(options.command, text), "utf-8")


def shortened(text: str, first: int, last: int | None) -> str:
    """Return a text's first and last lines. `last` is None for the whole text."""
    lines = text.split("\n")
    if last is None or len(lines) <= first + last + 1:
        return text
    left_out = len(lines) - first - last
    return "\n".join([*lines[:first], f"... {left_out} lines ...", *lines[len(lines) - last :]])


def picture(command: list[str], output: str) -> str:
    """Return a picture of a terminal as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.assemble(("$ ", "green"), (shlex.join(command), "bold")))
    console.print(Text(output))
    return FONT_FACE.sub("", console.export_svg(title="kdcli", unique_id="kdcli"))


if __name__ == "__main__":
    main()
