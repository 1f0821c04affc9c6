"""`python -m benchmarks.gpu` runs to its end without a GPU, and without all that a bare machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import TRITON_SITE

ROOT = Path(__file__).parents[2]
MISSING = (
    *("obstore", "huggingface_hub", "hf_xet", "click", "rich"),
    *("transformers", "accelerate", "peft", "vllm", "trl", "pytest", "hypothesis"),
)
"""What is not there on a machine with nothing but torch, triton, numpy, safetensors, zstandard and what the
kit carries.
"""

_BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys({missing!r}))
from tests.triton_interpreter import without_idle_work
without_idle_work()
from deltasync.gpu import codec
codec.warm_up = lambda device, width: None  # it decodes to compile; nothing is compiled here
sys.argv = ["benchmarks.gpu", "--json"]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def test_all_of_it_at_a_small_size(tmp_path: Path) -> None:
    if not TRITON_SITE.is_dir():
        pytest.skip(f"no {TRITON_SITE}; `make setup` installs triton there")
    code = _BARE.format(missing=MISSING)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TRITON_SITE), str(ROOT)]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["result"]
    assert found["failures"] == {}
    assert "interpreter" in found["device"]
    # nobody is told that times of an interpreter meet a bar
    assert {bar["met"] for bar in found["bars"]} == {None}
    launches = {row["what"]: row["launches"] for row in found["rows"]}
    counts = {
        "stage, decoded on the host": 1,
        "stage, decoded on the device": 1,
        "commit": 1,
        "rollback": 1,
        "audit": 1,
    }
    for operation, count in {"publish: detect": 2, **counts}.items():
        assert [launches[f"{tensors} tensors: {operation}"] for tensors in (15, 38)] == [count, count]
    for what in (
        "copy on the device",
        "swap",
        "captured graph",
        "staging beside a busy stream",
        "anchor: commit",
    ):
        assert what in launches
