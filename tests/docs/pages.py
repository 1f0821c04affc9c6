"""The pages of the repository, and the code in them.

A block is checked and not run if a comment that begins with `needs` (a GPU, an account, a checkout, ...) is
its first line or, as `<!-- needs ... -->`, where readers do not see it, stands above it. One whose first line
begins with `in a terminal of its own` goes on running while the blocks after it do, to the end of its
section.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced or indented block of code."""

    page: str
    section: str
    line: int
    language: str
    text: str
    hidden_note: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def note(self) -> str:
        """The comment above it or in its first line, without the mark."""
        if self.hidden_note:
            return self.hidden_note
        first = self.text.split("\n", 1)[0]
        return first.removeprefix("#").strip() if first.startswith("#") else ""

    @property
    def is_run(self) -> bool:
        is_code = self.is_shell or (self.language == "python" and not self.is_sketch)
        return is_code and not self.note.startswith("needs ")

    @property
    def is_shell(self) -> bool:
        return self.language in ("bash", "sh")

    @property
    def is_sketch(self) -> bool:
        """Whether `...` stands for something in it."""
        return re.search(r"[(\s]\.\.\.[,)]", self.text) is not None

    @property
    def stays(self) -> bool:
        """Whether it goes on running."""
        return self.note.startswith("in a terminal of its own")


@functools.cache  # four files of tests look for code in all pages
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Block]:
    found, name, section = [], page.relative_to(ROOT).as_posix(), ""
    tokens = _tokens(page)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if (
            token.type == "inline"
            and before is not None
            and before.type == "heading_open"
            and before.tag in ("h1", "h2")
        ):
            section = token.content
        elif token.type in ("fence", "code_block") and token.map is not None:
            language = token.info.split()[0] if token.info.strip() else ""
            above = before.content if before is not None and before.type == "html_block" else ""
            note = re.fullmatch(r"<!-- (needs .*) -->\s*", above)
            found.append(
                Block(name, section, token.map[0] + 1, language, token.content, note[1] if note else "")
            )
    return found


def before_code(page: Path) -> list[str]:
    """What stands between the title and the first code: types of markdown-it's blocks, without headings and
    comments.
    """
    tokens = _tokens(page)
    types = [token.type for token in tokens if token.level == 0]
    code = min((types.index(kind) for kind in ("fence", "code_block") if kind in types), default=len(types))
    return [kind for kind in types[:code] if kind.endswith("_open") and kind != "heading_open"]


def spans(page: Path) -> list[str]:
    """Code within the text."""
    return [
        child.content
        for token in _tokens(page)
        for child in token.children or []
        if child.type == "code_inline"
    ]


def metrics() -> set[str]:
    """Names in the table of docs/reference/metrics.md."""
    return set(
        re.findall(r"(?m)^\| `(.*?)`", (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8"))
    )
