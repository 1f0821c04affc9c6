"""The page for who must trust a commit names the files of a version's path, which are measured (ceilings)."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.version_path import NINE


def test_the_page_names_the_files_in_the_order_of_a_version() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## Read these nine files\n")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)) == NINE
    assert page.index("## Read these nine files") < page.index("## One weight change, out and in")
