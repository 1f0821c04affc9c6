"""The glossary is the law: words that left are on no page, and sentences have a subject.

Pages of history keep their words: the log, decisions, the changelog, and messages that a result recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

HISTORY = {"docs/LOG.md", "docs/glossary.md"}
PROSE = [
    page
    for page in PAGES
    if page.relative_to(ROOT).as_posix() not in HISTORY and page.parent != ROOT / "docs/decisions"
]
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
LEFT = [
    word.strip()
    for row in re.findall(r"(?m)^\| (.*?) \|", GLOSSARY.split("## Words that left")[1])
    for word in row.split(",")
    if word.strip() not in ("not", "---")
]
WAYS = (
    r"\bways? (to|from|around|between|through) (a |the |that |this |each |any )?(newest |next )?"
    r"(version|versions|nothing|it|identities)\b",
    r"\b(no|another|the cheapest) way (leads|to the newest|there)\b",
    r"\btak(e|es|ing) another way\b",
)
SUBJECT = re.compile(
    r"(?:^|[.:;!?] |\*\* |^[-*|] )(?:What|Whatever) (?!is this\b)[a-z][^?\n]*$", re.MULTILINE
)


def prose_of(page: Path) -> str:
    """The page without its code, its tables of results and its links' targets."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- results: .*?<!-- /results -->", "", text, flags=re.DOTALL)
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    text = re.sub(r"(?m)^    .*$", "", text)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", "`", text)


def found_in(text: str) -> Iterator[str]:
    for word in LEFT:
        pattern = r"\b" + re.escape(word).replace(r"\ ", r"\s+") + r"\b"
        yield from (match[0] for match in re.finditer(pattern, text, re.IGNORECASE))
    for pattern in WAYS:
        yield from (match[0] for match in re.finditer(pattern, text, re.IGNORECASE))


def test_the_list_is_read() -> None:
    assert {"fold", "hop", "course", "companions", "mend", "sweep"} <= set(LEFT)
    assert [*found_in("Another way leads to it; a fold from nothing.")] != []
    assert SUBJECT.search("It ends. What was visible stays.") and not SUBJECT.search("What is it?")


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_words_that_left_are_on_no_page(page: Path) -> None:
    assert [*found_in(prose_of(page))] == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_has_what_as_its_subject(page: Path) -> None:
    assert SUBJECT.findall(prose_of(page)) == []


LONG = {"docs/format.md"}  # one page, so that an implementer reads it from top to bottom
SHORT = [page for page in PROSE if page.relative_to(ROOT).as_posix() not in LONG]


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_short(page: Path) -> None:
    """At most 2,500 words, and cells of tables that are read at a glance."""
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 2500
    cells = [
        cell for line in text.splitlines() if line.startswith("| ") for cell in line.strip("| ").split(" | ")
    ]
    assert [cell for cell in cells if len(cell.split()) > 40] == []


PACKAGES = ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback")
CODE = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_words_that_left_are_not_in_code(path: Path) -> None:
    """Nor does a sentence of a docstring or a comment begin with `What` or `Whatever`."""
    text = re.sub(r'overflow, no_wrap = "fold"', "", path.read_text(encoding="utf-8"))  # rich's word
    assert [*found_in(text)] == []
    assert re.findall(r'(?:"""|# |[.:;] )(?:What|Whatever) [a-z][^?\n]*', text) == []
