"""The notebooks print what they show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs/notebooks"


def printed(cell: Mapping[str, Any]) -> str:
    """What a cell tells, in stdout and as its value; stdout comes in as many pieces as it happens to."""
    outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    return "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)


@pytest.mark.filterwarnings("default")  # the packages around Jupyter warn of one another
@pytest.mark.parametrize("name", ["look_into_a_delta", "follow_a_run"])
def test_notebook_prints_what_it_shows(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    shown = [printed(cell) for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=120).execute()
    assert [printed(cell) for cell in notebook.cells] == shown


def test_one_cell_alone_uses_deltasync() -> None:
    notebook = nbformat.read(NOTEBOOKS / "look_into_a_delta.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert ["deltasync" in cell.source for cell in cells] == [True] + [False] * (len(cells) - 1)
    assert not any("torch" in cell.source for cell in cells[1:])
