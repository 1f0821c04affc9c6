"""The table of docs/reliability.md, between two markers: each row is entered by the test that ran it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults_matrix.matrix import ROWS, Row, Seen

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"

_BEGIN, _END = "<!-- faults: written by make test-faults -->", "<!-- end of faults -->"
_HEAD = "| fault | times | noticed by | what is said | comes back by | in |\n| --- | --- | --- | --- | --- | --- |\n"
_LONGEST = 300  # characters of a message


def faults(page: Path) -> list[str]:
    """The faults that the page has rows of."""
    return list(_rows(page))


def enter(page: Path, row: Row, seen: Seen, folder: Path) -> None:
    """Write the row, in the order of ROWS; drop those that are no more, and say of which there is no result yet.

    Args:
        page: The document.
        row: Which.
        seen: What came of it.
        folder: Of the test, which the page does not need to name.
    """
    rows = _rows(page)
    rows[row.fault] = _line(row, str(seen.times), _said(seen.said, folder), _seconds(seen.recovered_s))
    parts: dict[str, list[str]] = {}
    for each in ROWS:
        parts.setdefault(each.part, []).append(rows.get(each.fault, _line(each, "0", "not run yet", "")))
    body = "\n".join(f"### {part}\n\n{_HEAD}" + "\n".join(lines) + "\n" for part, lines in parts.items())
    before, rest = page.read_text().split(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n\n{body}\n{_END}{rest.split(_END)[1]}")


def _line(row: Row, times: str, said: str, seconds: str) -> str:
    return f"| {' | '.join([row.fault, times, row.noticed, said, row.back, seconds])} |"


def _rows(page: Path) -> dict[str, str]:
    text = page.read_text().split(_BEGIN)[1].split(_END)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| fault |", "| --- |"))]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def _said(text: str, folder: Path) -> str:
    """The message without what differs from run to run."""
    text = text.replace(str(folder), "/data")
    text = re.sub(r"http://127\.0\.0\.1:\d+", "http://store", text)
    text = re.sub(r"deltasync-\d+-\d+", "bucket", text)
    text = re.sub(r"[0-9a-f]{32}", "…", text)
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.995 else f"{seconds:.1f} s"
