"""Adds files outside docs/ to the site: README.md and its neighbours, and the files that pages link to.

On GitHub these links lead to the files themselves; in the site each file that is linked becomes a page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")
_FROM_TOP = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
_TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def _below_docs(match: re.Match[str]) -> str:
    """A link from the top of the repository as it is from docs/."""
    path = match[1]
    if path.startswith("docs/") and (ROOT / path).is_dir():
        path += min((ROOT / path).glob("*.md")).name
    return "](" + (path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}")


def _outside(source: str, link: str) -> str | None:
    """Path in the repository of what the page `source` links to, None if that is below docs/ or not there."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), link))
    return path if not path.startswith("docs/") and (ROOT / path).exists() else None


def _page_of(path: str) -> str:
    return path.lower() if path in _TOP else f"source/{path}.md"


def _content(path: str) -> str:
    target = ROOT / path
    if target.is_dir():
        names = sorted(
            entry.name + "/" * entry.is_dir() for entry in target.iterdir() if entry.name[0] not in "._"
        )
        return f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    language = _LANGUAGES.get(target.suffix, "text")
    return f"# {path}\n\n~~~~~~{language}\n{target.read_text(encoding='utf-8')}~~~~~~\n"


def _generated(config: MkDocsConfig, page: str, text: str) -> File:
    return File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a page links to."""
    for name in _TOP:
        text = _FROM_TOP.sub(_below_docs, (ROOT / name).read_text(encoding="utf-8"))
        files.append(_generated(config, name.lower(), text))
    found = set()
    for file in files.documentation_pages():
        if file.src_uri.endswith(".md"):
            found |= {_outside(file.src_uri, link) for link in _LINK.findall(file.content_string)}
    for path in sorted(path for path in found if path is not None and path not in _TOP):
        files.append(_generated(config, _page_of(path), _content(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to those pages."""
    source = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        path = _outside(source, match[1])
        return (
            match[0]
            if path is None
            else f"]({posixpath.relpath(_page_of(path), PurePosixPath(source).parent)}"
        )

    return _LINK.sub(link, markdown)
