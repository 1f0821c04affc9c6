"""docs/security.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:tests/\S+\.py)|(?:test_\w+))`", (ROOT / "docs" / "security.md").read_text("utf-8"))
    functions = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text("utf-8"))
    }
    assert len(named) > 15
    missing = [name for name in named if not ((ROOT / name).is_file() if "/" in name else name in functions)]
    assert not missing
