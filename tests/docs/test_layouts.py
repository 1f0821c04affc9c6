"""The page has the layouts that tests make, and those that were only read."""

from __future__ import annotations

from tests.docs.pages import ROOT
from tests.integration import kernels


def test_the_table_of_kernels_for_gpus_is_what_the_tests_run() -> None:
    text = (ROOT / "docs" / "operations" / "layouts.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| ")][2:] == kernels.rows()
