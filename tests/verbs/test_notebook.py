"""The notebook of the documentation runs as it stands, and shows its table and its picture."""

import contextlib
import json
import platform
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
EXAMPLES = 200
"""Each candidate is scored on all held-out examples, so the demo has fewer of them."""


@pytest.fixture
def book():
    pytest.importorskip("nbclient")
    return pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)


def check(compressed, frame, picture, predicted, shipped):
    """Check what the cells print or show. Only the size is the same on every machine."""
    assert re.search(r"2-quantize is .*smaller \(", compressed)
    assert "2-quantize" in frame["text/html"]
    assert picture["text/html"].count("<svg") == 2
    assert [line[:6] for line in predicted.splitlines()] == ["topic-"] * 3
    assert "model_quantized.onnx" in shipped["text/plain"]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def test_the_stored_outputs_are_complete_and_name_no_machine(book):
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert "config={" in cells[0].source
    assert "pd.DataFrame(" in cells[0].source
    compressed, frame, picture, predicted, shipped = cells
    assert "times as fast as demo " in printed(compressed)
    check(
        printed(compressed),
        frame.outputs[-1].data,
        picture.outputs[-1].data,
        printed(predicted),
        shipped.outputs[-1].data,
    )
    stored = json.dumps([cell.outputs for cell in cells])
    assert re.findall(r"(?<![\w.:/<])/(?:home|root|tmp|work|Users|opt|usr|var)\b", stored) == []
    assert platform.node() not in stored
    # Progress and warnings differ from run to run.
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)


@pytest.mark.drawn
def test_the_cells_run(book, tmp_path, demo_examples):
    """In this process, whose libraries are imported."""
    shells = pytest.importorskip("IPython.core.interactiveshell")
    capture_output = pytest.importorskip("IPython.utils.capture").capture_output
    demo_examples(EXAMPLES)
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
        cell for cell in book.cells if cell.cell_type == "code"
    )
    check(
        printed(compressed),
        frame.outputs[-1].data,
        picture.outputs[-1].data,
        printed(predicted),
        shipped.outputs[-1].data,
    )
