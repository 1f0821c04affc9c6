"""Run a test file again with the triton that `make setup` keeps outside of the environment's site-packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

TRITON_SITE = Path(sys.prefix) / "triton-site"


def run_here(file: str, cache: Path, tests: Sequence[str], **environment: str) -> None:
    """In a process of its own, where triton can be imported; skips where there is none."""
    if not TRITON_SITE.is_dir():
        pytest.skip(f"no {TRITON_SITE}; `make setup` installs triton there")
    root = Path(__file__).parents[1]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TRITON_SITE), str(root)]),
        "TRITON_CACHE_DIR": str(cache),
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, *tests]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
