"""Print the mass of the code by folder, next to the last release: `make size`.

Mass is the number of Python tokens without comments, docstrings and line ends. Unlike lines, it
does not change when code is wrapped or documented. It informs, and fails nothing.

    python -m tools.size
    python -m tools.size --release   after a release: store the present values
"""

import ast
import io
import json
import sys
import tokenize
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kdcli", "tests", "tools", "benchmarks")
RELEASED = Path(__file__).with_name("size.json")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass
class Size:
    """Tokens and lines of some files."""

    tokens: int = 0
    lines: int = 0

    def add(self, other: "Size") -> None:
        self.tokens += other.tokens
        self.lines += other.lines


def size_of(source: str) -> Size:
    """Measure one file."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    counted = [t for t in tokens if t.type not in LAYOUT and t.start not in docstrings]
    return Size(len(counted), source.count("\n"))


def sizes(root: Path) -> dict[str, Size]:
    """Measure the Python files of a checkout, by folder and by subfolder."""
    total: dict[str, Size] = defaultdict(Size)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            size = size_of(path.read_text("utf-8"))
            parts = path.relative_to(root).parts
            names = {folder, "/".join(parts[:2])} if len(parts) > 2 else {folder}
            for name in names:
                total[name].add(size)
    return dict(sorted(total.items()))


def main() -> None:
    """Print the table, or store the present values as the last release's."""
    now = sizes(ROOT)
    if "--release" in sys.argv[1:]:
        from kdcli.version import __version__

        values = {name: astuple(size) for name, size in now.items()}
        RELEASED.write_text(json.dumps({"version": __version__, "sizes": values}, indent=1) + "\n")
        return
    released = json.loads(RELEASED.read_text("utf-8"))
    before = {name: Size(*values) for name, values in released["sizes"].items()}
    print(f"{'':20}{'tokens':>10}{'lines':>9}{'tokens a line':>15}   {released['version']}: tokens")
    for name in sorted({**before, **now}):
        size, old = now.get(name, Size()), before.get(name, Size())
        density = size.tokens / size.lines if size.lines else 0.0
        print(f"{name:20}{size.tokens:10,}{size.lines:9,}{density:15.1f}{old.tokens:17,}")


if __name__ == "__main__":
    main()
