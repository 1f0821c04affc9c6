"""The notebook prints what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/look_into_a_delta.ipynb"


def printed(cell: Mapping[str, Any]) -> list[str]:
    """What a cell tells, in stdout and as its value."""
    return [output.get("text") or output["data"]["text/plain"] for output in cell.get("outputs", [])]


@pytest.mark.filterwarnings("default")  # the packages around Jupyter warn of one another
def test_notebook_prints_what_it_shows() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = [printed(cell) for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=120).execute()
    assert [printed(cell) for cell in notebook.cells] == shown


def test_one_cell_alone_uses_deltasync() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert ["deltasync" in cell.source for cell in cells] == [True] + [False] * (len(cells) - 1)
    assert not any("torch" in cell.source for cell in cells[1:])
