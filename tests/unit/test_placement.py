from __future__ import annotations

from benchmarks import placement, results


def test_the_table_of_the_documentation_is_what_the_code_takes() -> None:
    assert results.load("placement")["result"] == placement.measure()
