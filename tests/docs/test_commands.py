"""What README and docs/ tell people to type: each block that can run here runs as written, the others are
checked.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasync import Publisher
from deltasync.config import PublisherOptions, PublisherSettings, ReplicaSettings, Retention, TrainerSettings
from demo.processes import Child
from tests.docs.pages import PAGES, ROOT, Block, before_code, blocks
from trl_callback import DeltaSyncConfig

BLOCKS = [block for page in PAGES for block in blocks(page)]
QUICK = {("README.md", "Ten lines of Python")}
WALK = ("docs/quickstart.md", "A channel, in a minute")  # by test_walk.py
PACKAGES = ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback", "deploy", "examples")
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
# With the pieces of long messages joined.
CODE = re.sub(r'"\s+f?"', "", "".join(path.read_text(encoding="utf-8") for path in SOURCES))
SETTINGS = {
    field.name
    for settings in (PublisherSettings, ReplicaSettings, Retention, TrainerSettings)
    for field in dataclasses.fields(settings)
}


def sections() -> Iterator[Any]:
    for key, section in itertools.groupby(BLOCKS, lambda block: (block.page, block.section)):
        if key != WALK and (run := [block for block in section if block.is_run]):
            yield pytest.param(run, id="::".join(key), marks=() if key in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("section", list(sections()))
def test_blocks_run_as_written(section: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each section in a directory of its own, which has the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CI": "1", "OMP_NUM_THREADS": "1"}
    names: dict[str, object] = {}
    with contextlib.ExitStack() as running:
        for block in section:
            if block.language == "python":
                exec(compile(block.text, block.where, "exec"), names)
                continue
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            child = running.enter_context(
                Child(block.where, command, environ, tmp_path / f"{block.line}.log")
            )
            if not block.stays:
                child.wait(500)
                child.check()


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.is_shell], ids=lambda block: block.where
)
def test_shell_is_valid(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=lambda block: block.where
)
def test_python_is_valid(block: Block) -> None:
    """Also of sketches: what they import is there, and our classes take these arguments."""
    known = {
        "Publisher": inspect.signature(Publisher).parameters.keys() | PublisherOptions.__annotations__.keys(),
        "DeltaSyncCallback": {field.name for field in dataclasses.fields(DeltaSyncConfig)},
    }
    is_elsewhere = block.note.startswith("needs MLX") and importlib.util.find_spec("mlx_lm") is None
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import | ast.ImportFrom) and not is_elsewhere:
            exec(compile(ast.Module([node], []), block.where, "exec"), {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            assert {keyword.arg for keyword in node.keywords} <= known[node.func.id]


EXPLAIN = {"docs/LOG.md", "docs/format.md", "docs/glossary.md"}
FOLDERS = {
    ROOT / "docs" / folder
    for folder in ("", "guides", "operations", "reference", "reliability", "benchmarks")
}
TASKS = [page for page in PAGES if page.parent in FOLDERS]


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_starts_with_what_does_it(page: Path) -> None:
    """A command or code, after a sentence at most; those in EXPLAIN have nothing to type."""
    assert page.relative_to(ROOT).as_posix() in EXPLAIN or before_code(page) in ([], ["paragraph_open"])


def test_the_index_leads_to_each_page() -> None:
    """The home leads to each page, or to the index of a folder, which leads to the others."""
    linked = set()
    for index in (ROOT / "docs/index.md", *sorted((ROOT / "docs").glob("*/index.md"))):
        for link in re.findall(r"\]\(([\w./-]+\.(?:md|ipynb))", index.read_text(encoding="utf-8")):
            if not link.startswith(".."):
                linked.add((index.parent / link).relative_to(ROOT / "docs").as_posix())
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in TASKS}
    assert pages - linked == {"index.md", "LOG.md"}


def test_the_site_leads_to_each_page() -> None:
    """As `mkdocs build --strict` demands, without building."""
    listed = re.findall(r"(?m)([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - set(listed) == set()


def test_variables_are_those_of_the_code() -> None:
    gone = ROOT / "docs/reference/replaced.md"
    variable = r"\bDELTASYNC_[A-Z_]*[A-Z]\b"
    named = {
        name
        for page in PAGES
        if page != gone
        for name in re.findall(variable, page.read_text(encoding="utf-8"))
    }
    settings = {f"DELTASYNC_{name.upper()}" for name in SETTINGS}
    assert settings - named == set()
    assert [name for name in named - settings if f'"{name}"' not in CODE] == []
    cells = re.findall(r"(?m)^\| (.*?) \| ", gone.read_text(encoding="utf-8"))
    assert settings.isdisjoint(name for cell in cells for name in re.findall(variable, cell))


def test_messages_of_the_failure_tables_exist() -> None:
    """What people search for is what is said: quoted messages stand in the code, with `...`, N and M for what
    varies.
    """
    page = (ROOT / "docs/operations/messages.md").read_text(encoding="utf-8")
    quoted = [
        message
        for row in re.findall(r"(?m)^\| (`.*?) \| ", page)
        for message in re.findall(r"`([^`]+)`", row)
    ]
    assert len(quoted) > 30
    parts = [part.strip() for message in quoted for part in re.split(r"\.\.\.|\b[NM]\b", message)]
    assert [part for part in parts if part not in CODE] == []
