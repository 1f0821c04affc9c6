"""Where Triton's kernels run in tests: on a GPU, or through Triton's interpreter in a process of its own.

`make setup` installs triton beside site-packages, because vLLM for the CPU does not import where triton is.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

TRITON_SITE = Path(sys.prefix) / "triton-site"
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or (HAS_TRITON and torch.cuda.is_available())
DEVICE = "cuda" if RUNS and not INTERPRETED else "cpu"


def _without_idle_work() -> None:
    """Triton 3.7's interpreter replaces the functions of `triton.language` at each launch and at each call of
    a function in a kernel, and computes each sum and product a second time for an assertion that only debug
    mode makes: three fifths of its time. Here the functions are replaced once, and for good.
    """
    from triton import language
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    kernel = types.SimpleNamespace(__globals__={"language": language, "core": language.core})
    interpreter._patch_lang(kernel)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


if INTERPRETED:
    _without_idle_work()


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
