"""Run docs/notebook.ipynb in an empty directory, and store what its cells print and show.

Run `python -m tools.notebook` on an otherwise idle machine: the outputs hold latencies. Progress
and warnings are not stored, because they differ between runs and can name files of the machine.
"""

import tempfile
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def main() -> None:
    """Run the notebook and write it with its outputs."""
    book = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(book, timeout=None, resources=resources).execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells, 1):
        cell.execution_count = number
        cell.metadata = {}
        cell.outputs = [o for o in cell.outputs if _is_result(o)]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
    book.metadata.language_info = {"name": "python"}
    nbformat.write(book, NOTEBOOK)  # type: ignore[no-untyped-call]


def _is_result(output: nbformat.NotebookNode) -> bool:
    """Return whether an output is printed text or the value of a cell's last line."""
    return output.output_type == "execute_result" or output.get("name") == "stdout"


if __name__ == "__main__":
    main()
