"""Commands that start engines, in README, docs/ and examples, have options that the engines know, as they
stand there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, spans

OWN = Path(sys.executable).parent
ENGINES = {
    "vllm serve": (OWN, [("vllm", "serve", "--help=all")]),
    "python -m sglang.launch_server": (
        ROOT / ".venv-sglang/bin",
        [("python", "-m", "sglang.launch_server", "--help")],
    ),
    "python -m mlx_plugin.server": (
        ROOT / ".venv-mlx/bin",
        [("python", "-m", "mlx_plugin.server", "--help"), ("python", "-m", "mlx_lm", "server", "--help")],
    ),
    "python examples/serve_transformers.py": (
        OWN,
        [
            ("python", "examples/serve_transformers.py", "--help"),
            ("python", "-m", "transformers.cli.transformers", "serve", "--help"),
        ],
    ),
}
"""By how a command begins: the programs of its environment, and what prints its options."""

LINES = re.compile(rf"(?:{'|'.join(map(re.escape, ENGINES))})\b[^\n`#|&]*")


def texts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for text in [*spans(page), *(block.text for block in blocks(page))]:
            yield page.name, text
    for path in [*(ROOT / "examples").rglob("*.py"), *(ROOT / "deltasync/ops/cli").glob("*.py")]:
        yield path.name, path.read_text(encoding="utf-8").replace('"\n        " ', " ")


FOUND = sorted(
    {(where, line) for where, text in texts() for line in LINES.findall(text.replace("\\\n", " "))}
)


def start_of(line: str) -> str:
    return next(start for start in ENGINES if line.startswith(start))


def test_each_engine_is_in_the_docs() -> None:
    assert {start_of(line) for where, line in FOUND if where.endswith(".md")} >= {
        "vllm serve",
        "python -m mlx_plugin.server",
        "python examples/serve_transformers.py",
    }


@pytest.mark.slow
@pytest.mark.parametrize("start", ENGINES)
def test_the_options_are_the_engine_s(start: str) -> None:
    programs, commands = ENGINES[start]
    if not (programs / commands[0][0]).exists():
        pytest.skip(f"{programs} is missing: make {programs.parent.name}/.ready")
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "400",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    printed = ""
    for name, *words in commands:
        done = subprocess.run(
            [programs / name, *words],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        printed += done.stdout
    options = set(re.findall(r"--[a-z][a-z0-9-]*", printed.replace("_", "-")))
    wrong = [
        (where, option)
        for where, line in FOUND
        if start_of(line) == start
        for option in re.findall(r"(?<!\S)\[?(--[a-z][a-z0-9-]*)", line)
        if option not in options
    ]
    assert not wrong
