"""Where Triton's kernels run in tests: on a GPU, or through Triton's interpreter in a process of its own.

`make setup` installs triton beside site-packages, because vLLM for the CPU does not import where triton is.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.triton_interpreter import without_idle_work

TRITON_SITE = Path(sys.prefix) / "triton-site"
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or (HAS_TRITON and torch.cuda.is_available())
DEVICE = "cuda" if RUNS and not INTERPRETED else "cpu"


if INTERPRETED:
    without_idle_work()


def run_again(files: list[str], scratch: Path, *arguments: str, **environment: str) -> None:
    """Run test files, or the tests of them that are named, where triton can be imported."""
    if not TRITON_SITE.is_dir():
        pytest.skip(f"no {TRITON_SITE}; `make setup` installs triton there")
    root = Path(__file__).parents[1]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TRITON_SITE), str(root)]),
        "TRITON_CACHE_DIR": str(scratch),
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *arguments]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
