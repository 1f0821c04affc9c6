"""The two walks in docs/architecture.md, and its table of questions, name files and functions that are
there.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## One weight change, out and in")[1].split("\n## ")[0]
QUESTIONS = PAGE.split("\n## Questions")[1].split("\n## ")[0]
HOPS = [
    (file, name)
    for line in SECTION.splitlines()
    for file, names in re.findall(r"`(\w+/\w+\.py)` ((?:`[\w.]+`(?:, )?)+)", line)
    for name in re.findall(r"`([\w.]+)`", names)
]


def defined(file: str) -> set[str]:
    """Functions and methods of a file, by their dotted names."""
    path = next(path for path in (ROOT / "deltasync" / file, ROOT / file) if path.is_file())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, functions):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, functions)}
    return found


def test_both_walks_have_hops() -> None:
    assert len(HOPS) >= 16


def test_answers_name_what_is_there() -> None:
    answers = re.findall(r"`([\w.]+)` in `(\w+/\w+\.py)`", QUESTIONS)
    assert len(answers) >= 8
    assert [(name, file) for name, file in answers if name not in defined(file)] == []
    assert all((ROOT / "deltasync" / file).is_file() for file in re.findall(r"`(\w+/\w+\.py)`", QUESTIONS))


@pytest.mark.parametrize(("file", "name"), HOPS)
def test_a_hop_is_there(file: str, name: str) -> None:
    assert name in defined(file)


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`(\w+/\w+\.py)`", SECTION))))
def test_a_file_is_there(file: str) -> None:
    assert defined(file)
