"""The notebook of the documentation runs as it stands, and shows its table and its picture."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def test_the_notebook_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.outputs for cell in book.cells if cell.cell_type == "code"), (
        "outputs are not committed"
    )
    # Each candidate is scored on all held-out examples.
    fewer = "from kdcli.data import demo; demo.EXAMPLES = 200"
    book.cells.insert(0, nbformat.v4.new_code_cell(fewer))
    nbclient.NotebookClient(
        book, timeout=None, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _, compressed, frame, picture, predicted, shipped = (
        cell.outputs for cell in book.cells if cell.cell_type == "code"
    )
    said = "".join(output.text for output in compressed if output.get("name") == "stdout")
    assert "times as fast as the teacher" in said
    assert "2-quantize" in frame[-1].data["text/html"]
    assert picture[-1].data["text/html"].count("<svg") == 2
    lines = "".join(output.text for output in predicted if output.get("name") == "stdout")
    assert [line[:6] for line in lines.splitlines()] == ["topic-"] * 3
    assert "model_quantized.onnx" in shipped[-1].data["text/plain"]
