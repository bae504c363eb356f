"""The notebook of the documentation runs as it stands, and shows its table and its picture."""

import contextlib
from pathlib import Path

import pytest

from kdcli.data import demo

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
EXAMPLES = 200
"""Each candidate is scored on all held-out examples, so the demo has fewer of them."""


@pytest.fixture
def book():
    pytest.importorskip("nbclient")
    notebook = pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code"), (
        "outputs are not committed"
    )
    return notebook


def check(compressed, frame, picture, predicted, shipped):
    """Check what the cells print or show."""
    assert "times as fast as demo " in compressed
    assert "2-quantize" in frame["text/html"]
    assert picture["text/html"].count("<svg") == 2
    assert [line[:6] for line in predicted.splitlines()] == ["topic-"] * 3
    assert "model_quantized.onnx" in shipped["text/plain"]


@pytest.mark.drawn
def test_the_cells_run(book, tmp_path, monkeypatch):
    """In this process, whose libraries are imported."""
    shells = pytest.importorskip("IPython.core.interactiveshell")
    capture_output = pytest.importorskip("IPython.utils.capture").capture_output
    monkeypatch.setattr(demo, "EXAMPLES", EXAMPLES)
    shell, shown = shells.InteractiveShell(), []
    shell.history_manager.enabled = False
    with contextlib.chdir(tmp_path):
        for cell in book.cells:
            if cell.cell_type == "code":
                with capture_output() as printed:
                    done = shell.run_cell(cell.source)
                done.raise_error()
                is_shown = done.result is not None
                data, _ = shell.display_formatter.format(done.result) if is_shown else ({}, {})
                shown.append(data if is_shown else printed.stdout)
    check(*shown)


@pytest.mark.long
def test_the_notebook_runs(book, tmp_path):
    import nbclient
    import nbformat

    fewer = f"from kdcli.data import demo; demo.EXAMPLES = {EXAMPLES}"
    book.cells.insert(0, nbformat.v4.new_code_cell(fewer))
    nbclient.NotebookClient(
        book, timeout=None, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _, compressed, frame, picture, predicted, shipped = (
        cell.outputs for cell in book.cells if cell.cell_type == "code"
    )
    printed = [
        "".join(output.text for output in outputs if output.get("name") == "stdout")
        for outputs in (compressed, predicted)
    ]
    check(printed[0], frame[-1].data, picture[-1].data, printed[1], shipped[-1].data)
