"""Tests and files that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, spans

HISTORY = {ROOT / "docs/LOG.md"}
NAMED = [page for page in PAGES if page not in HISTORY and page.parent != ROOT / "docs/decisions"]
FILES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
DEFINED = {
    name
    for file in FILES
    for names in re.findall(
        r"(?m)^\s*(?:async )?(?:def (test_\w+)|class (Test\w+))", (ROOT / file).read_text("utf-8")
    )
    for name in names
    if name
}
EXAMPLES = re.compile(r"xyz", re.IGNORECASE)  # of a first change in CONTRIBUTING


def missing(page: Path) -> list[str]:
    named = [span for span in spans(page) if not EXAMPLES.search(span)]
    files = [span for span in named if re.fullmatch(r"(tests/)?(\w+/)*test_\w+\.py|tests/[\w/]+\.py", span)]
    tests = [span for span in named if re.fullmatch(r"test_\w+|Test[A-Z]\w+", span)]
    return [
        *(file for file in files if not any(each == file or each.endswith(f"/{file}") for each in FILES)),
        *(test for test in tests if test not in DEFINED),
    ]


@pytest.mark.parametrize("page", NAMED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    assert missing(page) == []


def test_missing_names_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`test_what_a_page_names_is_there`, `test_no_such_thing`, `test_no_such_file.py`, "
        "`tests/docs/pages.py`"
    )
    assert missing(page) == ["test_no_such_file.py", "test_no_such_thing"]
