"""Fixtures that several integration tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSpeed, from the package index: where it is installed, transformers and TRL import it everywhere."""
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles a part of itself, and there is no g++ here")
    # the others that it needs, vLLM needs too
    return installed(tmp_path_factory.mktemp("deepspeed"), "deepspeed==0.19.8", "hjson", "msgpack")


@pytest.fixture(scope="session")
def bitsandbytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bitsandbytes, from the package index: where it is installed, PEFT imports it everywhere."""
    return installed(tmp_path_factory.mktemp("bitsandbytes"), "bitsandbytes==0.50.2")


def installed(folder: Path, *packages: str) -> Path:
    """A folder with these packages alone; skips the test where pip cannot install them."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        *packages,
    ]
    done = subprocess.run(
        command, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {packages[0]}: {done.stderr.strip().splitlines()[-1]}")
    return folder
