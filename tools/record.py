"""Run a command and save what it prints as a picture of a terminal.

    python -m tools.record -o docs/images/demo.svg -- kdcli compress demo-classifier ...

The picture has the command, and the text of stdout and stderr in the order of the lines. Exits with
the command's code, and writes no picture if the command fails.
"""

import argparse
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 92


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
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
    options.output.write_text(picture(options.command, done.stdout), "utf-8")


def picture(command: list[str], output: str) -> str:
    """Return a picture of a terminal as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.assemble(("$ ", "green"), (shlex.join(command), "bold")))
    console.print(Text(output.rstrip("\n")))
    return console.export_svg(title="kdcli", unique_id="kdcli")


if __name__ == "__main__":
    main()
