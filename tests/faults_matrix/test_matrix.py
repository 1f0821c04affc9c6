"""Every row of the fault matrix; `make test-faults` runs all of them and writes docs/results/faults.json."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults_matrix import kills, machine, servers, successors, table
from tests.faults_matrix.matrix import ROWS, Lab, Row

supervised = servers.supervised

assert successors and kills and machine  # whose import fills ROWS


@pytest.mark.parametrize("row", [pytest.param(row, marks=row.marks, id=row.fault) for row in ROWS])
def test_fault(row: Row, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seen = row.run(Lab(tmp_path, request))
    assert seen.said
    if "FAULT_RESULTS" in os.environ:
        table.enter(Path(os.environ["FAULT_RESULTS"]), row, seen, tmp_path)


def test_the_table_has_these_rows() -> None:
    assert [row["fault"] for row in table.rows(table.RESULTS)] == [row.fault for row in ROWS]
