from __future__ import annotations

from pathlib import Path

from benchmarks import placement

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_documentation_is_what_the_code_takes() -> None:
    assert "\n".join(placement.lines()) in (ROOT / "docs" / "operations.md").read_text()
