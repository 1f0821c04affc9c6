"""The result file of the fault matrix, the tables of docs/reliability/: each row is entered by the test that ran it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import common
from tests.faults_matrix.matrix import ROWS, Row, Seen

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "faults.json"

_LONGEST = 300  # characters of a message


def rows(results: Path) -> list[dict[str, Any]]:
    """The rows of the file, none if there is no such file."""
    return json.loads(results.read_text())["result"] if results.exists() else []


def enter(results: Path, row: Row, seen: Seen, folder: Path) -> None:
    """Write the row, in the order of ROWS; drop those that are no more, and say of which there is no result yet.

    Args:
        results: The file.
        row: Which.
        seen: What came of it.
        folder: The test's folder, which the file does not need to name.
    """
    found = {each["fault"]: each for each in rows(results)}
    found[row.fault] = _entry(row, seen.times, _said(seen.said, folder), seen.recovered_s)
    entries = [found.get(each.fault, _entry(each, 0, "not run yet", None)) for each in ROWS]
    document = {**common.document(entries), "command": "make test-faults"}
    results.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _entry(row: Row, times: int, said: str, recovered_s: float | None) -> dict[str, Any]:
    texts = {"part": row.part, "fault": row.fault, "noticed": row.noticed, "said": said, "back": row.back}
    return {**texts, "times": times, "recovered_s": recovered_s}


def _said(text: str, folder: Path) -> str:
    """The message without what differs from run to run."""
    text = text.replace(str(folder), "/data")
    text = re.sub(r"http://127\.0\.0\.1:\d+", "http://store", text)
    text = re.sub(r"deltasync-\d+-\d+", "bucket", text)
    text = re.sub(r"[0-9a-f]{32}", "…", text)
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
